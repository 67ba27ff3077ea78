"""Thread slots: where handlers run. A slot gets a job and returns an ``Outcome``; it never sees a connection.

A thread cannot be killed. A job that ignores its cancel flag keeps its thread; the loop abandons that slot and settles the job
without it, and the slot is usable again when the handler returns after all.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from dbqueue import clock
from dbqueue.database.tables import ClaimedRow
from dbqueue.errors import Bury, RetryLater, summary_of
from dbqueue.payload import CorruptPayload
from dbqueue.runtime.context import JobContext, executing
from dbqueue.states import Kind, State
from dbqueue.targets import MAX_DELAY, Target

log = logging.getLogger("dbqueue.jobs")


@dataclass(eq=False)
class Work:
    """One claimed job on its way through a slot. Without a target it is never started."""

    row: ClaimedRow
    target: Target[Any] | None
    context: JobContext
    abandoned: bool = False


@dataclass(frozen=True)
class Outcome:
    """How one run ended, as far as the handler can say: SUCCEEDED, BLOCKED, DEAD, or PENDING for "failed, try again". The loop knows the
    policy and decides. ``delay`` (microseconds) is the handler's own wish."""

    work: Work
    state: State
    kind: Kind | None
    summary: str | None
    duration: float
    delay: int | None = None


class ThreadSlots:
    def __init__(self, size: int, ring: Callable[[], None]) -> None:
        self.size, self._ring = size, ring
        self._inbox: SimpleQueue[Work | None] = SimpleQueue()
        self._done: deque[Outcome] = deque()
        self.busy = 0
        self.abandoned = 0
        self._threads: list[threading.Thread] = []

    @property
    def idle(self) -> int:
        return self.size - self.busy

    def start(self, work: Work) -> bool:
        """Only the loop calls this, and only while ``idle`` is positive: nothing waits in memory (D11). False: the system gives no
        more threads; the job was not started, and the slots are as many as there are threads from now on."""
        if len(self._threads) < min(self.size, self.busy + 1):
            thread = threading.Thread(target=self._serve, name=f"dbqueue-slot-{len(self._threads) + 1}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                self.size = len(self._threads)
                log.error("the system gives no more threads: %d slots from now on", self.size)
                return False
            self._threads.append(thread)
        self.busy += 1
        self._inbox.put(work)
        return True

    def collect(self) -> list[Outcome]:
        """What ended since the last call; abandoned jobs only free their slot."""
        outcomes = []
        while self._done:
            outcome = self._done.popleft()
            self.busy -= 1
            if outcome.work.abandoned:
                self.abandoned -= 1
            else:
                outcomes.append(outcome)
        return outcomes

    def abandon(self, work: Work) -> None:
        work.abandoned = True
        self.abandoned += 1

    def close(self, patience: float) -> bool:
        """Ends the idle threads; returns whether all have ended. The others are daemons and end with the process."""
        for _ in self._threads:
            self._inbox.put(None)
        until = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (work := self._inbox.get()) is not None:
            began = time.monotonic()
            try:
                # A context of its own: what one handler sets, the next one does not see.
                outcome = contextvars.Context().run(execute, work)
            except BaseException as error:  # the slot must not die with it
                log.error("job %s ended in an error of its slot", work.context.id, exc_info=error)
                summary = type(error).__name__
                outcome = Outcome(work, State.PENDING, Kind.FAILED, summary, time.monotonic() - began)
            self._done.append(outcome)
            self._ring()


def execute(work: Work) -> Outcome:
    """Decode, run, and turn whatever happened into an Outcome."""
    began = time.monotonic()
    assert work.target is not None

    def ended(state: State, kind: Kind | None = None, summary: str | None = None, delay: int | None = None) -> Outcome:
        return Outcome(work, state, kind, summary, time.monotonic() - began, delay)

    try:
        payload = work.target.schema.decode(work.row.payload)
    except CorruptPayload as error:
        return ended(State.BLOCKED, Kind.CORRUPT_PAYLOAD, summary_of(error))
    try:
        with executing(work.context):
            if work.target.schema.record is None:
                work.target.handler()
            else:
                work.target.handler(payload)
    except Bury as error:
        return ended(State.DEAD, Kind.REJECTED, summary_of(error))
    except RetryLater as error:
        return ended(State.PENDING, Kind.FAILED, summary_of(error), _wish(error.delay))
    except BaseException as error:  # a SystemExit in a handler is its failure, not the worker's
        # The log may say more than the row does (D10).
        log.warning(
            "job %s %s raised in attempt %d", work.context.id, work.target.name, work.row.attempt, exc_info=error
        )
        return ended(State.PENDING, Kind.FAILED, summary_of(error))
    return ended(State.SUCCEEDED)


def _wish(delay: object) -> int | None:
    """Microseconds; None, and so the target's own backoff, for what is no number of seconds."""
    if (
        isinstance(delay, bool)
        or not isinstance(delay, (int, float))
        or (isinstance(delay, float) and math.isnan(delay))
    ):
        return None
    return round(min(max(0.0, delay), MAX_DELAY) * clock.SECOND)
