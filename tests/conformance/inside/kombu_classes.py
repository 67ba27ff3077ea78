"""Kombu's functional tests are classes to be derived from, with a connection from the transport under test."""

from __future__ import annotations

import kombu
import kombu.serialization  # what makes the URL known is loaded with it: by Celery, Queue, Producer, but not by Connection alone
import pytest
import t.integration.common as common  # type: ignore[import-not-found]
from recorder import PLAN  # type: ignore[import-not-found]


@pytest.fixture
def connection() -> kombu.Connection:
    return kombu.Connection(PLAN["broker"])


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    return kombu.Connection(PLAN["dead_broker"], connect_timeout=2)


@pytest.fixture
def failover_connection() -> kombu.Connection:
    return kombu.Connection(f"{PLAN['dead_broker']};{PLAN['broker']}", connect_timeout=2)


for name, base in list(vars(common).items()):
    if isinstance(base, type) and base.__module__ == common.__name__:
        assert name.startswith(("Base", "Basic")), f"{name} is new, and does not look like a class to derive from"
        derived = f"Test{name.removeprefix('Base')}"
        globals()[derived] = type(derived, (base,), {})
