"""Events as log lines: the one place that decides level and wording. Logger ``dbqueue``; nothing in a line is a payload, a key or a
foreign error text, except the tracebacks of handlers that ``slots`` logs to ``dbqueue.jobs``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dbqueue import events

log = logging.getLogger("dbqueue")

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR


Line = tuple[int, str, tuple[Any, ...]]


def _started(e: events.JobStarted) -> Line:
    return DEBUG, "job %s %s started, attempt %d, queue %s", (e.id, e.target, e.attempt, e.queue)


def _ended(e: events.JobEnded) -> Line | None:
    level = (
        INFO
        if e.outcome in ("succeeded", "acked") or e.kind == "released"
        else ERROR
        if e.outcome in ("dead", "blocked")
        else WARNING
    )
    if not log.isEnabledFor(level):
        return None
    text, args = "job %s %s %s, attempt %d, %.3f s", [e.id, e.target, e.outcome, e.attempt, e.duration]
    if e.kind is not None:
        text, args = text + ", %s", [*args, e.kind if e.summary is None else f"{e.kind}: {e.summary}"]
    if e.retry_in is not None:
        text, args = text + ", again in %.3g s", [*args, e.retry_in]
    return level, text, tuple(args)


def _started_worker(e: events.WorkerStarted) -> Line:
    text = "worker %s on %s: queues %s, %d slots, lease %g s, %d targets"
    return INFO, text, (e.worker, e.database, ", ".join(e.queues), e.slots, e.lease, e.targets)


_LINES: dict[type[events.Event], Callable[[Any], Line | None]] = {
    events.JobStarted: _started,
    events.JobEnded: _ended,
    events.WorkerStarted: _started_worker,
    events.ClaimLost: lambda e: (
        WARNING, "job %s %s: the claim of attempt %d was lost, its result was not recorded", (e.id, e.target, e.attempt),
    ),
    events.LeasesExpired: lambda e: (
        WARNING, "leases of lost workers: %d jobs again, %d dead, %d unknown", (e.again, e.dead, e.unknown),
    ),
    events.JobTimedOut: lambda e: (
        WARNING, "job %s %s: attempt %d passed its timeout of %g s", (e.id, e.target, e.attempt, e.timeout),
    ),
    events.SlotAbandoned: lambda e: (
        ERROR, "job %s %s ignores its timeout: its slot is abandoned (%d, at %d the worker ends)",
        (e.id, e.target, e.abandoned, e.limit),
    ),
    events.DatabaseTrouble: lambda e: (ERROR, "worker %s: %s; trying again", (e.worker, e.error)),
    events.DatabaseBack: lambda e: (
        INFO, "worker %s: the database is back after %.1f s, %d unknown claims handed back", (e.worker, e.seconds, e.released),
    ),
    events.WorkerStopping: lambda e: (INFO, "worker %s stops (%s), %d jobs running", (e.worker, e.reason, e.running)),
    events.WorkerStopped: lambda e: (
        INFO, "worker %s stopped: %d jobs ended, %d handed back, %d left to their lease", (e.worker, e.done, e.released, e.left),
    ),
    events.BeatStarted: lambda e: (INFO, "beat %s on %s", (e.beat, e.database)),
    events.BeatStopped: lambda e: (INFO, "beat %s stopped: %d jobs fired", (e.beat, e.fired)),
    events.ScheduleFired: lambda e: (
        INFO, "schedule %s%s fired %s: job %s", (e.owner and e.owner + " ", e.name, e.slot.isoformat(), e.id),
    ),
    events.ScheduleBroken: lambda e: (ERROR, "schedule %s%s is set aside: %s", (e.owner and e.owner + " ", e.name, e.error)),
    events.CursorsAhead: lambda e: (
        WARNING, "the cursor of %s lies in the future: the database's clock went back, and they are silent until it has caught up "
        "(`dbqueue schedules reset` begins them anew)", (", ".join(e.names),),
    ),
    events.HistoryPruned: lambda e: (DEBUG, "history: %d rows pruned", (e.rows,)),
}  # fmt: skip


def write(event: events.Event) -> None:
    make = _LINES.get(type(event))
    line = None if make is None else make(event)
    if line is not None:
        level, text, args = line
        log.log(level, text, *args)


@contextmanager
def log_events() -> Iterator[None]:
    # Two kinds of lines are seldom wanted, one of them for each job.
    unsubscribe = events.subscribe(
        write, but=() if log.isEnabledFor(DEBUG) else (events.JobStarted, events.HistoryPruned)
    )
    try:
        yield
    finally:
        unsubscribe()
