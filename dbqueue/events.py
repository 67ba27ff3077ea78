"""Facts that runtimes emit after the commit that made them true; logs and metrics subscribe.

A verb never logs. A runtime calls ``emit``; one subscriber decides level and wording (``runtime/log.py``), another may
count. An event never carries a payload, a key or the text of an exception (D10).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from uuid import UUID

from msgspec import Struct

log = logging.getLogger("dbqueue.events")


class Event(Struct, frozen=True, gc=False):
    """The root of all events."""


class JobStarted(Event, frozen=True, gc=False):
    id: UUID
    target: str
    queue: str
    attempt: int


class JobEnded(Event, frozen=True, gc=False):
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


class ClaimLost(Event, frozen=True, gc=False):
    """The lease ended, or the job was cancelled or taken over: its result was not recorded (D13)."""

    id: UUID
    target: str
    attempt: int


class LeasesExpired(Event, frozen=True, gc=False):
    """The sweep found jobs whose worker is gone."""

    again: int
    dead: int
    unknown: int


class JobTimedOut(Event, frozen=True, gc=False):
    id: UUID
    target: str
    attempt: int
    timeout: float


class SlotAbandoned(Event, frozen=True, gc=False):
    """A job ignored its cancel flag; its thread cannot be killed and is not used until the job returns."""

    id: UUID
    target: str
    abandoned: int
    limit: int


class DatabaseTrouble(Event, frozen=True, gc=False):
    """The first failure of a series; the tries that follow are silent until DatabaseBack."""

    worker: str
    error: str


class DatabaseBack(Event, frozen=True, gc=False):
    worker: str
    seconds: float
    released: int


class WorkerStarted(Event, frozen=True, gc=False):
    worker: str
    database: str
    queues: tuple[str, ...]
    slots: int
    lease: float
    targets: int


class WorkerStopping(Event, frozen=True, gc=False):
    worker: str
    reason: str
    running: int


class WorkerStopped(Event, frozen=True, gc=False):
    worker: str
    done: int
    released: int
    left: int
    exit_code: int


class HistoryPruned(Event, frozen=True, gc=False):
    rows: int


class BeatStarted(Event, frozen=True, gc=False):
    beat: str
    database: str


class BeatStopped(Event, frozen=True, gc=False):
    beat: str
    fired: int


class ScheduleFired(Event, frozen=True, gc=False):
    """The job of one slot was written. ``owner`` is "" or a Celery app."""

    owner: str
    name: str
    slot: datetime
    id: UUID


class ScheduleBroken(Event, frozen=True, gc=False):
    """It cannot be fired, and waits until somebody changes it, or until the database takes its job."""

    owner: str
    name: str
    error: str


class CursorsAhead(Event, frozen=True, gc=False):
    """These schedules are silent until the database's clock has caught up with their cursor."""

    beat: str
    names: tuple[str, ...]


Subscriber = Callable[[Event], None]
_subscribers: list[tuple[Subscriber, frozenset[type[Event]]]] = []


def subscribe(subscriber: Subscriber, *, but: Iterable[type[Event]] = ()) -> Callable[[], None]:
    """Calls ``subscriber`` with every event of this process, except the kinds in ``but``, on the emitting thread; returns the way to
    end it."""
    entry = (subscriber, frozenset(but))
    _subscribers.append(entry)

    def unsubscribe() -> None:
        if entry in _subscribers:
            _subscribers.remove(entry)

    return unsubscribe


def wanted(kind: type[Event]) -> bool:
    """Whether anybody would hear an event of this kind: where one is emitted for each job, it is made only then."""
    return any(kind not in but for _, but in _subscribers)


def emit(event: Event) -> None:
    """A subscriber that raises is logged and otherwise left alone: counting jobs must not end the worker that runs them."""
    for subscriber, but in tuple(_subscribers):
        if type(event) in but:
            continue
        try:
            subscriber(event)
        except Exception:
            log.exception("a subscriber of %s raised", type(event).__name__)
