"""Makes the URL schemes known to kombu, which has no entry point for transports and refuses dotted names in URLs.

kombu loads every entry point of the group ``kombu.serializers`` when it is imported; this module is one of them, and really brings
a serializer, a harmless JSON one. It imports nothing but ``kombu.transport`` and never raises, or ``import celery`` would fail
in every program of the environment.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

TRANSPORT = "dbqueue.kombu_transport.transport:Transport"
SCHEMES = (
    "dbqueue", "dbqueue+postgresql", "dbqueue+postgres", "dbqueue+postgresql+psycopg", "dbqueue+postgresql+psycopg2",
    "dbqueue+sqlite", "dbqueue+sqlite+pysqlite",
)  # fmt: skip


def register() -> None:
    with contextlib.suppress(Exception):
        from kombu.transport import TRANSPORT_ALIASES

        for scheme in SCHEMES:
            TRANSPORT_ALIASES.setdefault(scheme, TRANSPORT)


def _encode(value: Any) -> str:
    return json.dumps(value)


def _decode(text: str | bytes) -> Any:
    return json.loads(text)


serializer: tuple[Callable[[Any], str], Callable[[str | bytes], Any], str, str] = (
    _encode, _decode, "application/x-dbqueue-json", "utf-8",
)  # fmt: skip

register()
