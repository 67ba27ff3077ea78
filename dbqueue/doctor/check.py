"""What a check is given and what it gives.

A *check* is one function: it looks at one thing, changes nothing, and returns one Finding under one stable name. A
*failure* means that jobs are refused, stuck or not kept as promised; a *warning* that they run, but slowly, or that
somebody has to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from dbqueue import views
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.queue import DBQueue
from dbqueue.views import QueueDepth

NAMED = 5
"""How many things of one kind a sentence names before it only counts them."""


class Status(str, Enum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """``sentence`` says what was seen, ``remedy`` what to do about it (None where all is well)."""

    name: str
    status: Status
    sentence: str
    remedy: str | None = None


class Problem(NamedTuple):
    status: Status
    sentence: str
    remedy: str


@dataclass
class Patient:
    """One database, seen through one queue's settings."""

    queue: DBQueue
    with_targets: bool
    """The queue's module was imported, so its targets are all known."""
    role: str | None
    """What the connection's user is meant to do: a name of ``privileges.ROLES``; None: everything."""
    patience: float
    """Seconds that a due job or an ended lease may wait before somebody is missing."""
    notes: set[str] = field(default_factory=set)
    """What an early check found out and others need to know; ``stop``: they are not worth making."""

    @property
    def database(self) -> Database:
        return self.queue.database

    @cached_property
    def session(self) -> OwnSession:
        """The doctor's own connection, made when a check first needs it. It prepares nothing: poolers lose that."""
        session = self.database.open_session()
        if hasattr(session.connection, "prepare_threshold"):
            session.connection.prepare_threshold = None
        return session

    def close(self) -> None:
        if "session" in self.__dict__:
            self.session.close()

    @cached_property
    def now(self) -> int:
        return self.database.dialect.now(self.session)

    @cached_property
    def depths(self) -> list[QueueDepth]:
        return views.depths(self.database.dialect, self.session)


class Check(NamedTuple):
    name: str
    run: Callable[[Patient], Finding]
    bounded: bool = True
    """It only reads, on the doctor's session: on a server inside a short read-only transaction with timeouts."""


def verdict(name: str, problems: Sequence[Problem], fine: str) -> Finding:
    """The worst of the problems, all of their sentences, and the remedies of the worst; ``fine`` when there is none."""
    if not problems:
        return Finding(name, Status.OK, fine)
    worst = Status.FAILURE if any(p.status is Status.FAILURE for p in problems) else Status.WARNING
    first = sorted(problems, key=lambda p: p.status is not worst)
    remedies = dict.fromkeys(p.remedy for p in first if p.status is worst)
    return Finding(name, worst, listed([p.sentence for p in first], "; "), "; ".join(list(remedies)[:NAMED]))


def listed(words: Sequence[str], separator: str = ", ") -> str:
    """The first of them, and how many more there are."""
    more = len(words) - NAMED
    return separator.join(words[:NAMED]) + (f"{separator}and {more} more" if more > 0 else "")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
