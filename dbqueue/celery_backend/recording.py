"""What a task leaves behind, kept until its worker writes it in a transaction of its own: results, chord parts, messages.

All of it is plain data, which can be pickled and sent from the process that ran the task to the one that settles it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dbqueue.database.tables import NewJob
from dbqueue.kombu_transport import recorded


class Row(NamedTuple):
    """One result."""

    task_id: str
    state: str
    meta: bytes
    ttl: int | None


class Part(NamedTuple):
    """A chord's part that has returned, and with it its result, if that is kept."""

    group_id: str
    task_id: str
    place: int
    meta: bytes
    row: Row | None
    body: dict[str, Any]


@dataclass
class Record:
    """What was recorded, in its order. ``Backend.apply`` writes it."""

    entries: list[Row | Part | NewJob] = field(default_factory=list)

    @contextmanager
    def publishing(self, database_id: str) -> Iterator[None]:
        """Until the block ends, what this thread publishes to the broker in that database is recorded too, and not written."""
        with recorded.into(self.entries, database_id):
            yield
