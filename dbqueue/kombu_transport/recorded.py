"""Messages that are not written when they are published, but later, in a transaction of whoever settles the task that sent them.

Only messages: queues, exchanges and bindings are declared at once, and remote control, events and replies go at once, as they do
beside a caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class _Recorder(NamedTuple):
    entries: list[Any]
    database_id: str


_current: ContextVar[_Recorder | None] = ContextVar("dbqueue_recorded", default=None)


@contextmanager
def into(entries: list[Any], database_id: str) -> Iterator[None]:
    """Until the block ends, messages that this thread publishes to the broker in that database are put into ``entries`` as NewJobs;
    those for other brokers are sent. A block of ``using(...)`` inside of it counts more."""
    token = _current.set(_Recorder(entries, database_id))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def apart() -> Iterator[None]:
    """Until the block ends, messages are written as if nothing were recorded."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def entries_for(database_id: str) -> list[Any] | None:
    """Where a message goes that is published now; None: it is to be written."""
    recorder = _current.get()
    return recorder.entries if recorder is not None and recorder.database_id == database_id else None
