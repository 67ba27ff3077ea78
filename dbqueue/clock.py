"""Instants are BIGINT UTC microseconds, and "now" is always the database's (H14).

This is the only file that knows how to say "now" in a dialect. Every statement takes an ``offset`` beside it: zero in
production; a test advances its clock by moving the offset, on every database and without sleeping. Python's own wall clock
decides nothing: workers whose clocks are hours apart agree.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

POSTGRES_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
# SQLite 3.40 has no unixepoch('subsec'); julianday carries milliseconds.
SQLITE_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000"

SECOND = 1_000_000
"""Microseconds in a second."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Clock:
    """The offset that is added to the database's clock; only the testing kit moves it."""

    __slots__ = ("offset",)

    def __init__(self) -> None:
        self.offset = 0

    def advance(self, seconds: float) -> None:
        self.offset += round(seconds * SECOND)


def to_datetime(instant: int) -> datetime:
    return _EPOCH + timedelta(microseconds=instant)


def to_instant(when: datetime) -> int:
    """``when`` must be aware; exact to the microsecond (no float in between)."""
    delta = when - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * SECOND + delta.microseconds
