"""The tables, and the shapes that go into the verbs and come out of them.

Both dialects keep the same columns (their DDL is in ``migrations/``); the SQLAlchemy tables here serve the statements that
every database runs alike, which ``views`` writes in Core and compiles once per dialect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from msgspec import Struct
from sqlalchemy import BigInteger, Column, Integer, LargeBinary, MetaData, SmallInteger, Table, Text

from dbqueue.states import Kind, OnCrash, State

SCHEMA_VERSION = 4
"""The newest migration that this code knows."""

_BOTH = (
    "id", "task_id", "target", "fingerprint", "payload", "key", "queue", "priority", "state", "run_at", "attempt", "lapses",
    "max_attempts", "timeout_ms", "on_crash", "token", "worker", "error_kind", "error_summary", "source", "sequence",
    "created_at", "started_at", "head", "expires_at",
)  # fmt: skip
JOB_COLUMNS = (*_BOTH, "ready_at", "queued_at", "lease_until", "updated_at")
FINISHED_COLUMNS = (*_BOTH, "finished_at")

_BINARY = {"id", "token", "fingerprint", "payload", "head"}
_SMALL = {"priority", "state", "on_crash", "attempt", "lapses", "max_attempts", "timeout_ms"}
_INSTANTS = {
    "run_at",
    "ready_at",
    "queued_at",
    "lease_until",
    "created_at",
    "started_at",
    "updated_at",
    "finished_at",
    "sequence",
    "expires_at",
}

TABLES = (
    "jobs", "finished", "meta", "migrations", "view", "exchanges", "queues", "bindings", "consumers", "mail", "mail_ids", "cursors",
    "revoked", "schedules", "owners", "locks", "results", "groups", "chords", "chord_parts",
)  # fmt: skip

BEST_PRIORITY, DEFAULT_PRIORITY = 9, 0


def stored_priority(priority: int) -> int:
    """Callers say 0 to 9, larger first, as AMQP does; the index wants smaller first."""
    return BEST_PRIORITY - priority


@dataclass(frozen=True)
class Names:
    """Where the tables live: ``schema`` exists on PostgreSQL only. Both parts are checked identifiers."""

    prefix: str = "dbqueue_"
    schema: str | None = None

    def __post_init__(self) -> None:
        for part in (self.prefix, self.schema):
            # They are written into statement texts: nothing but a plain identifier may come this far.
            if part is not None and not re.fullmatch(r"[a-z_][a-z0-9_]{0,30}", part):
                raise ValueError("a table prefix or schema must be a plain lower-case identifier")

    def qualified(self, name: str) -> str:
        own = f'"{self.prefix}{name}"'
        return own if self.schema is None else f'"{self.schema}".{own}'

    def fill(self, template: str) -> str:
        """Writes the names into a statement; ``replace`` and not ``format``, since SQL may hold braces of its own."""
        for name in TABLES:
            template = template.replace("{" + name + "}", self.qualified("all_jobs" if name == "view" else name))
        return template.replace("{prefix}", self.prefix).replace("{schema}", self.schema or "")

    @property
    def salt(self) -> str:
        """What makes the advisory keys and channels of two installations in one database differ."""
        return f"{self.schema or ''}.{self.prefix}"

    @cached_property
    def tables(self) -> tuple[Table, Table]:
        meta = MetaData(schema=self.schema)
        return (
            Table(f"{self.prefix}jobs", meta, *(_column(name) for name in JOB_COLUMNS)),
            Table(f"{self.prefix}finished", meta, *(_column(name) for name in FINISHED_COLUMNS)),
        )


def _column(name: str) -> Column[object]:
    kind = (
        LargeBinary if name in _BINARY else SmallInteger if name == "priority" else Integer if name in _SMALL
        else BigInteger if name in _INSTANTS else Text
    )  # fmt: skip
    return Column(name, kind())


class NewJob(Struct, frozen=True, gc=False):
    """What enqueue writes. ``run_at`` is an instant; without it the job is due ``delay`` microseconds after the database's now.
    ``head`` makes it a message (see ``kombu_transport``), which expires ``ttl`` microseconds after it was written."""

    id: bytes
    target: str
    queue: str
    payload: bytes
    max_attempts: int
    priority: int = stored_priority(DEFAULT_PRIORITY)
    key: str | None = None
    fingerprint: bytes | None = None
    timeout_ms: int | None = None
    on_crash: OnCrash = OnCrash.RETRY
    run_at: int | None = None
    delay: int = 0
    task_id: str | None = None
    source: str | None = None
    sequence: int | None = None
    head: bytes | None = None
    ttl: int | None = None


@dataclass(frozen=True)
class Letter:
    """A short-lived message as ``post`` writes it. ``bells``: the names of the queues whose sleepers are to be rung; ``ttl`` in
    microseconds."""

    exchange: str
    routing_key: str
    head: bytes
    payload: bytes
    ttl: int
    bells: tuple[str, ...]


class Enqueued(Struct, frozen=True, gc=False):
    id: bytes
    duplicate: bool


class Move(Struct, frozen=True, gc=False):
    """A schedule's cursor goes from ``was`` to ``last_slot``; ``next_at``: when to look at it again (None: never)."""

    owner: str
    name: str
    was: int
    last_slot: int
    next_at: int | None
    fired: int = 0
    error: str | None = None


class StoredResult(Struct, frozen=True, gc=False):
    """What a task came to, as Celery's serializer wrote it. ``bell``: the name under which those sleep that wait for it; ``ttl`` in
    microseconds, None: for ever."""

    task_id: str
    state: str
    meta: bytes
    bell: str
    ttl: int | None


class ChordCount(Struct, frozen=True, gc=False):
    """How many parts of a chord have returned, of how many (None: not all are published), and whether its body was dealt with."""

    returned: int
    size: int | None
    done: bool

    @property
    def complete(self) -> bool:
        return self.size is not None and self.returned >= self.size and not self.done


IN_PLACE = -1
"""A delay: again at once, at the place in its queue that the job had."""


class Settlement(Struct, frozen=True, gc=False):
    """What an executor says about a claim it holds: an ended state, BLOCKED, or PENDING (again after ``delay`` microseconds, or
    IN_PLACE). ``refund`` gives the attempt back: nothing of the job was executed. ``payload``: the job goes on with this one, and
    may have one attempt more: the one that ends here did what it was to do."""

    id: bytes
    token: bytes
    state: State
    queue: str
    kind: Kind | None = None
    summary: str | None = None
    delay: int = 0
    refund: bool = False
    payload: bytes | None = None

    @property
    def plain(self) -> bool:
        return self.state is State.SUCCEEDED


class Fact(str, Enum):
    """What the database answers about one claim (D13). Only LOST ends ownership; BUSY means ask again next turn."""

    DONE = "done"
    AGAIN = "again"
    RENEWED = "renewed"
    ALREADY = "already"
    BUSY = "busy"
    LOST = "lost"


class Held(Struct, frozen=True, gc=False):
    """The identity of a claim: what renewing needs."""

    id: bytes
    token: bytes


@dataclass
class ClaimRequest:
    """Claim up to ``limit`` jobs from ``queues`` (a queue's jobs by priority; the queues in this order)."""

    queues: tuple[str, ...]
    limit: int
    worker: str
    token: bytes
    lease: int

    def filled_by(self, found: int) -> bool:
        """Whether so many are as many as a claim of this size brings: there may be more."""
        return found >= 1 << (self.limit.bit_length() - 1)


class ClaimedRow(Struct, frozen=True, gc=False):
    """A job that is ours until ``lease_until``, by the database's clock."""

    id: bytes
    token: bytes
    task_id: str | None
    target: str
    fingerprint: bytes | None
    payload: bytes
    key: str | None
    queue: str
    priority: int
    ready_at: int
    attempt: int
    lapses: int
    max_attempts: int
    timeout_ms: int | None
    on_crash: int
    lease_until: int
    head: bytes | None = None
    expires_at: int | None = None


CLAIMED_COLUMNS = (
    "id", "task_id", "target", "fingerprint", "payload", "key", "queue", "priority", "attempt", "lapses",
    "max_attempts", "timeout_ms", "on_crash", "lease_until", "head", "expires_at",
)  # fmt: skip


@dataclass
class Turn:
    """One round of a worker: settle, renew, claim, in this order and in one transaction."""

    settlements: list[Settlement] = field(default_factory=list)
    renewals: list[Held] = field(default_factory=list)
    lease: int = 0
    claim: ClaimRequest | None = None
    looks: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Statements that read, to be answered in the same round trip, after the claim (``TurnResult.more``)."""
    prompt: bool = False
    """What it claims is wanted at once: there is no second look for more before it is told."""


@dataclass
class TurnResult:
    settled: list[Fact] = field(default_factory=list)
    renewed: list[Fact] = field(default_factory=list)
    claimed: list[ClaimedRow] = field(default_factory=list)
    whole: bool = True
    """The claim looked everywhere. False: only beyond the low-water marks, so finding little does not mean that little is there."""
    now: int | None = None
    more: list[list[Sequence[Any]]] = field(default_factory=list)
    """The rows of what was read in the same round trip."""


@dataclass(frozen=True)
class Due:
    """What upkeep did, and when it has to look again (instants; None: nothing is waiting)."""

    now: int
    promoted: int
    again: int
    dead: int
    unknown: int
    next_run: int | None
    next_lease: int | None
    ready: bool = False
    """Something is claimable in the worker's queues; False: no, or not looked."""


@dataclass(frozen=True)
class Changed:
    """The answer of a verb by hand: the state that it found (None: no such job) and whether it moved the job."""

    found: State | None
    moved: bool
    reason: str | None = None
