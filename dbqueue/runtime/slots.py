"""Thread slots: where handlers run. A slot gets a job and returns an ``Outcome``; it never sees a connection.

``async def`` handlers run as tasks of one event loop (``coroutines``) and count as slots like the others.

Short jobs stay in a warm thread, since waking one costs more than running them: of the threads that are awake, one is the *scout*.
It takes a job, and if more are waiting it wakes the next thread, which is the scout then. A handler that blocks gives up the
interpreter, so the new scout takes the next job at once, and all jobs run at the same time after a few steps; a handler that returns
at once is back before the new scout has even started, and takes the next job itself.

A thread cannot be killed. A job that ignores its cancel flag keeps its thread; the loop abandons that slot and settles the job
without it, and the slot is usable again when the handler returns after all.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Protocol

from dbqueue.runtime.coroutines import Coroutines
from dbqueue.runtime.execute import Outcome, Work, execute
from dbqueue.states import Kind, State

log = logging.getLogger("dbqueue.jobs")


class Slots(Protocol):
    """What the worker's loop asks of the place where its jobs run; only the loop calls it."""

    size: int
    abandoned: int
    kills: ClassVar[bool]
    """Whether ``abandon`` ends the job: then a timeout needs no grace and no slot is lost to it."""
    broken: str | None
    """Why nothing can run any more; the worker ends."""
    files: tuple[int, ...]
    """Readable when ``collect`` has something to look at, beside its rings."""

    @property
    def idle(self) -> int: ...
    @property
    def busy(self) -> int: ...
    def processes(self) -> dict[int, Work | None]:
        """Where jobs run outside of this process: process ids, and what each works on. From any thread."""

    def start(self, work: Work) -> bool: ...
    def resize(self, size: int) -> None:
        """So many from now on. What runs in a slot that is one too many may end."""

    def collect(self) -> list[Outcome]: ...
    def abandon(self, work: Work) -> None: ...
    def close(self, patience: float) -> bool: ...


class ThreadSlots:
    kills: ClassVar[bool] = False
    broken: str | None = None
    files: tuple[int, ...] = ()

    def __init__(self, size: int, ring: Callable[[], None]) -> None:
        self.size, self._ring = size, ring
        self._coroutines: Coroutines | None = None
        self._inbox: deque[Work] = deque()
        self._lock = threading.Lock()
        """Guards the inbox, the scout's office and the parked threads: nobody goes to sleep while a job is being brought."""
        self._scout = False
        """A thread was woken that has not looked into the inbox yet."""
        self._parked: list[threading.Lock] = []
        """What the sleeping threads wait for, the one that slept last on top: its memory is warm."""
        self._closing = False
        self._done: deque[Outcome] = deque()
        self.busy = 0
        self.abandoned = 0
        self._threads: list[threading.Thread] = []

    @property
    def idle(self) -> int:
        return max(0, self.size - self.busy)

    def processes(self) -> dict[int, Work | None]:
        return {}

    def start(self, work: Work) -> bool:
        """Only the loop calls this, and only while ``idle`` is positive: nothing waits in memory (D11). False: the system gives no
        more threads; the job was not started, and the slots are as many as there are threads from now on."""
        if work.target is not None and work.target.is_async:
            self._coroutines = self._coroutines or Coroutines(self._finished)
            self.busy += 1
            self._coroutines.start(work)
            return True
        if len(self._threads) < min(self.size, self.busy + 1):
            bell = threading.Lock()
            bell.acquire()
            name = f"dbqueue-slot-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._serve, args=(bell,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                self.size = len(self._threads)
                log.error("the system gives no more threads: %d slots from now on", self.size)
                return False
            self._threads.append(thread)
            with self._lock:
                self._parked.append(bell)
        self.busy += 1
        with self._lock:
            self._inbox.append(work)
            self._send_scout()
        return True

    def resize(self, size: int) -> None:
        self.size = size

    def _send_scout(self) -> None:
        """With the lock held. There are as many threads as jobs in slots: if none sleeps, one is about to take the next job."""
        if not self._scout and self._parked:
            self._scout = True
            self._parked.pop().release()

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

    def _finished(self, outcome: Outcome) -> None:
        self._done.append(outcome)
        self._ring()

    def abandon(self, work: Work) -> None:
        work.abandoned = True
        self.abandoned += 1

    def close(self, patience: float) -> bool:
        """Ends the idle threads; returns whether all have ended. The others are daemons and end with the process."""
        with self._lock:
            self._closing = True
            while self._parked:  # each once: this may be called again before the threads have woken
                self._parked.pop().release()
        until = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        ended = self._coroutines is None or self._coroutines.close(max(0.0, until - time.monotonic()))
        return ended and not any(thread.is_alive() for thread in self._threads)

    def _serve(self, bell: threading.Lock) -> None:
        while not self._closing:
            bell.acquire()
            scout = True
            while (work := self._next(bell, scout=scout)) is not None:
                scout = False
                began = time.monotonic()
                try:
                    # A context of its own: what one handler sets, the next one does not see.
                    outcome = contextvars.Context().run(execute, work)
                except BaseException as error:  # the slot must not die with it
                    log.error("job %s ended in an error of its slot", work.context.id, exc_info=error)
                    summary = type(error).__name__
                    outcome = Outcome(work, State.PENDING, Kind.FAILED, summary, time.monotonic() - began)
                self._finished(outcome)

    def _next(self, bell: threading.Lock, *, scout: bool) -> Work | None:
        """The next job, or None: sleep until the bell. Who leaves jobs behind sends a scout."""
        with self._lock:
            if scout:
                self._scout = False
            if not self._inbox:
                self._parked.append(bell)
                return None
            work = self._inbox.popleft()
            if self._inbox:
                self._send_scout()
            return work
