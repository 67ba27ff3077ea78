"""What the result backend's URL and ``result_backend_transport_options`` say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from dbqueue.errors import ConfigError
from dbqueue.settings import JobSettings, describe

log = logging.getLogger("dbqueue.results")

MAX_BYTES = 64 << 20

_SETTINGS = frozenset({"schema", "prefix", "notify", "listen_url", "auto_migrate"})
_OWN = _SETTINGS | {"max_result_bytes"}
# Of other backends: known, and without effect here.
_FOREIGN = frozenset(
    {
        "global_keyprefix", "retry_policy", "master_name", "result_chord_ordered", "sentinel_kwargs", "min_other_sentinels",
        "additional_connection_errors", "visibility_timeout", "socket_timeout", "socket_connect_timeout", "socket_keepalive",
        "health_check_interval", "max_connections", "retry_on_timeout", "client_name", "credential_provider",
    }
)  # fmt: skip
_told: set[str] = set()


@dataclass(frozen=True)
class Options:
    settings: JobSettings
    max_bytes: int = MAX_BYTES
    """Of one encoded result."""


def read(url: str, given: Mapping[str, Any]) -> Options:
    """``url`` is a database URL, with or without ``dbqueue+``. Raises ConfigError, naming the option."""
    base, _, query = url.removeprefix("dbqueue+").partition("?")
    own: dict[str, Any] = {}
    rest = []
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in _OWN:
            own[name] = {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)
        else:
            rest.append((name, text))
    for name, value in given.items():
        if name in _OWN:
            own[name] = value
        elif name not in _FOREIGN and name not in _told:
            _told.add(name)
            log.warning("result_backend_transport_options: %r is not known and has no effect", name)
    limit = own.pop("max_result_bytes", MAX_BYTES)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1 << 30:
        raise ConfigError(
            f"result backend option max_result_bytes must be a whole number from 1 to {1 << 30}; got {describe(limit)}"
        )
    # Blanks and quotes in values: the driver's own syntax, so no plus signs.
    text = base + ("?" + urlencode(rest, quote_via=quote) if rest else "")
    return Options(JobSettings.from_options(url=text, **own), limit)
