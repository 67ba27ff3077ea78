"""Facts that runtimes emit after the commit that made them true; logs and metrics subscribe.

A verb never logs. A runtime calls ``emit``; one subscriber decides level and wording (``runtime/log.py``), another may
count. An event never carries a payload, a key or the text of an exception (D10).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

log = logging.getLogger("dbqueue.events")


@dataclass(frozen=True)
class Event:
    """The root of all events."""


@dataclass(frozen=True)
class JobStarted(Event):
    id: UUID
    target: str
    queue: str
    attempt: int


@dataclass(frozen=True)
class JobEnded(Event):
    """One attempt ended and the database agreed: ``outcome`` is the state that the job has now."""

    id: UUID
    target: str
    queue: str
    attempt: int
    outcome: str
    kind: str | None
    summary: str | None
    duration: float
    retry_in: float | None = None


@dataclass(frozen=True)
class ClaimLost(Event):
    """The lease ended, or the job was cancelled or taken over: its result was not recorded (D13)."""

    id: UUID
    target: str
    attempt: int


@dataclass(frozen=True)
class LeasesExpired(Event):
    """The sweep found jobs whose worker is gone."""

    again: int
    dead: int
    unknown: int


@dataclass(frozen=True)
class JobTimedOut(Event):
    id: UUID
    target: str
    attempt: int
    timeout: float


@dataclass(frozen=True)
class SlotAbandoned(Event):
    """A job ignored its cancel flag; its thread cannot be killed and is not used until the job returns."""

    id: UUID
    target: str
    abandoned: int
    limit: int


@dataclass(frozen=True)
class DatabaseTrouble(Event):
    """The first failure of a series; the tries that follow are silent until DatabaseBack."""

    worker: str
    error: str


@dataclass(frozen=True)
class DatabaseBack(Event):
    worker: str
    seconds: float
    released: int


@dataclass(frozen=True)
class WorkerStarted(Event):
    worker: str
    database: str
    queues: tuple[str, ...]
    slots: int
    lease: float
    targets: int


@dataclass(frozen=True)
class WorkerStopping(Event):
    worker: str
    reason: str
    running: int


@dataclass(frozen=True)
class WorkerStopped(Event):
    worker: str
    done: int
    released: int
    left: int
    exit_code: int


@dataclass(frozen=True)
class HistoryPruned(Event):
    rows: int


Subscriber = Callable[[Event], None]
_subscribers: list[Subscriber] = []


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Calls ``subscriber`` with every event of this process, on the emitting thread; returns the way to end it."""
    _subscribers.append(subscriber)

    def unsubscribe() -> None:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)

    return unsubscribe


def emit(event: Event) -> None:
    """A subscriber that raises is logged and otherwise left alone: counting jobs must not end the worker that runs them."""
    for subscriber in tuple(_subscribers):
        try:
            subscriber(event)
        except Exception:
            log.exception("a subscriber of %s raised", type(event).__name__)
