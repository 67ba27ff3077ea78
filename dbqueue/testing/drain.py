"""The bounded drain: a real worker in the calling thread runs what is due, and says what became of it.

Jobs go through the production claim, dispatch and finish; handlers run in the worker's slot threads, as they do in
production, so thread-locals of the test are not theirs. The kit only notes what a handler raised, which a worker
otherwise logs and forgets.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from dbqueue import clock, events
from dbqueue.database import joined
from dbqueue.errors import DatabaseBusy, NotSupported
from dbqueue.queue import DBQueue
from dbqueue.runtime.context import current_job
from dbqueue.runtime.log import log_events
from dbqueue.runtime.worker import EXIT_CLEAN, Worker, WorkerOptions
from dbqueue.targets import Target
from dbqueue.views import JobRecord

LOCK_PATIENCE = 2.0
"""Seconds that a drain waits for a transaction that holds the file, before it blames the test for it."""

_OUTCOMES = {"pending": "failed"}

Raised = dict[tuple[UUID, int], BaseException]


@dataclass(frozen=True)
class Ended:
    """One attempt. ``outcome``: succeeded, failed (it will be tried again), dead, blocked, released (handed back
    unfinished), or lost (cancelled or taken over while it ran: nothing was recorded). ``error`` is what the handler
    raised, with its traceback."""

    id: UUID
    target: str
    attempt: int
    outcome: str
    kind: str | None = None
    summary: str | None = None
    retry_in: float | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Drained:
    """What a drain did: every attempt in the order of its end, and how many ended how."""

    ended: tuple[Ended, ...] = ()

    @property
    def succeeded(self) -> int:
        return self.count("succeeded")

    @property
    def failed(self) -> int:
        """Attempts that failed and will be made again, perhaps later: ``case.advance`` makes them due."""
        return self.count("failed")

    @property
    def dead(self) -> int:
        return self.count("dead")

    @property
    def blocked(self) -> int:
        return self.count("blocked")

    @property
    def errors(self) -> list[BaseException]:
        """What handlers raised, in order."""
        return [ended.error for ended in self.ended if ended.error is not None]

    def count(self, outcome: str) -> int:
        return sum(ended.outcome == outcome for ended in self.ended)

    def __len__(self) -> int:
        return len(self.ended)


class NotDrained(AssertionError):
    """The drain ended and jobs are still due, or the worker could not go on. ``drained`` is what was done until
    then."""

    def __init__(self, message: str, drained: Drained) -> None:
        super().__init__(message)
        self.drained = drained


def drain(queue: DBQueue, *, max_jobs: int, slots: int, queues: tuple[str, ...] | None, raise_errors: bool) -> Drained:
    _check_transactions(queue)
    worker = Worker(queue, WorkerOptions(once=True, max_jobs=max_jobs, slots=slots, queues=queues))
    raised: Raised = {}
    worker.targets = {name: _watched(target, raised) for name, target in worker.targets.items()}
    ended: list[Ended] = []
    trouble: list[str] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.JobEnded):
            outcome = "released" if event.kind == "released" else _OUTCOMES.get(event.outcome, event.outcome)
            error = raised.get((event.id, event.attempt))
            ended.append(
                Ended(event.id, event.target, event.attempt, outcome, event.kind, event.summary, event.retry_in, error)
            )
        elif isinstance(event, events.ClaimLost):
            error = raised.get((event.id, event.attempt))
            ended.append(Ended(event.id, event.target, event.attempt, "lost", error=error))
        elif isinstance(event, events.DatabaseTrouble):  # a worker would try for ever, a test must not
            trouble.append(event.error)
            worker.stop("trouble with the database")
            worker.stop("trouble with the database")

    with log_events(), _events_of_this_thread(note):
        exit_code = worker.run()
    drained = Drained(tuple(ended))
    if trouble:
        raise NotDrained(f"the worker met trouble with the database: {trouble[0]}", drained)
    if exit_code != EXIT_CLEAN:
        raise NotDrained(f"the worker gave up with exit code {exit_code}: a job ignores its timeout", drained)
    if worker.claimed >= max_jobs and (due := _due(queue, worker.queues)):
        raise NotDrained(_still_due(max_jobs, drained, due), drained)
    if raise_errors and drained.errors:
        raise drained.errors[0]
    return drained


def _check_transactions(queue: DBQueue) -> None:
    if joined.current() is not None:
        raise NotSupported(
            "drain() inside using(...): no worker sees these jobs before the commit; drain after the block"
        )
    database = queue.database
    try:
        with database.session() as session:
            session.begin(time.monotonic() + LOCK_PATIENCE)
            session.rollback()
    except DatabaseBusy:
        raise NotSupported(
            "drain(): an open transaction of the test holds the write lock of the case's database, and the worker "
            "would wait for it for ever; commit it or roll it back first"
        ) from None


def _watched(target: Target[Any], raised: Raised) -> Target[Any]:
    """The same target, whose handler leaves what it raises in ``raised`` and raises it."""
    original: Callable[..., Any] = target.handler

    @contextmanager
    def noting() -> Iterator[None]:
        job = current_job()
        try:
            yield
        except BaseException as error:
            assert job is not None
            raised[job.id, job.attempt] = error
            raise

    def handler(*payload: Any) -> None:
        __tracebackhide__ = True
        with noting():
            original(*payload)

    async def async_handler(*payload: Any) -> None:
        __tracebackhide__ = True
        with noting():
            await original(*payload)

    watched: Callable[..., Any] = async_handler if inspect.iscoroutinefunction(original) else handler
    return Target(target.name, watched, target.schema, target.policy, target._writer)


@contextmanager
def _events_of_this_thread(note: Callable[[events.Event], None]) -> Iterator[None]:
    """A worker emits on the thread of its loop, so another case's worker in another thread is not heard here."""
    own = threading.get_ident()
    unsubscribe = events.subscribe(lambda event: note(event) if threading.get_ident() == own else None)
    try:
        yield
    finally:
        unsubscribe()


def _due(queue: DBQueue, names: tuple[str, ...]) -> list[JobRecord]:
    now = clock.to_datetime(queue.database.read(queue.database.dialect.now))
    pending = [record for name in names for record in queue.jobs(state="pending", queue=name, limit=100_000)]
    return [record for record in pending if record.run_at <= now]


def _still_due(max_jobs: int, drained: Drained, due: list[JobRecord]) -> str:
    ran = Counter(ended.target for ended in drained.ended)
    left = Counter(record.target for record in due)
    return (
        f"more than max_jobs={max_jobs} jobs were due. Run: {_listed(ran)}. Still due: {_listed(left)}. "
        "Does a job enqueue itself? If not, give drain(max_jobs=...) more."
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.most_common(5)) or "none"
