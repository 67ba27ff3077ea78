"""What a handler sees of the worker that runs it: the current job, and ports for its dependencies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Generic, TypeVar
from uuid import UUID

from dbqueue.ids import as_uuid
from dbqueue.settings import check_name

T = TypeVar("T")


class JobContext:
    """The job that the current thread executes: ``dbqueue.current_job()``."""

    __slots__ = (
        "_event",
        "_id",
        "_raw_id",
        "attempt",
        "beat_at",
        "is_cancelled",
        "max_attempts",
        "noticed",
        "on_beat",
        "on_cancel",
        "target",
    )

    def __init__(self, job_id: bytes, target: str, attempt: int, max_attempts: int) -> None:
        self._raw_id, self.target, self.attempt, self.max_attempts = job_id, target, attempt, max_attempts
        self._id: UUID | None = None
        self.is_cancelled = False
        self.on_cancel: Callable[[], None] | None = None
        """How the flag reaches a coroutine, or a child process."""
        self.beat_at = 0.0
        """Of time.monotonic(): from then on a message's time is counted; see ``deliver``."""
        self.on_beat: Callable[[], None] | None = None
        """How a heartbeat leaves a child process."""
        self._event: threading.Event | None = None
        self.noticed = False
        """The handler has seen the flag: if it returns now, it has stopped half-way and not succeeded."""

    @property
    def id(self) -> UUID:
        if self._id is None:  # most jobs run without anybody asking
            self._id = as_uuid(self._raw_id)
        return self._id

    def __repr__(self) -> str:
        return f"<JobContext {self.id} of {self.target}, attempt {self.attempt}/{self.max_attempts}>"

    @property
    def cancelled(self) -> bool:
        """The timeout passed, the lease was lost, the job was cancelled, or the worker must stop: a handler that runs long looks
        here between its steps and returns or raises. Having seen True, its return is not taken for success."""
        self.noticed = self.is_cancelled
        return self.noticed

    def wait(self, seconds: float) -> bool:
        """Sleeps unless cancelled; returns whether it was."""
        self._event = event = (
            self._event or threading.Event()
        )  # made only where it is needed: it costs more than the rest
        self.noticed = self.is_cancelled or event.wait(seconds)
        return self.noticed

    def beat(self) -> None:
        """The job's time begins anew, from any thread."""
        self.beat_at = time.monotonic()
        if self.on_beat is not None:
            self.on_beat()

    def cancel(self) -> None:
        """Sets the flag, from any thread. First the flag and then the event, as ``wait`` looks the other way round."""
        self.is_cancelled = True
        if self._event is not None:
            self._event.set()
        if self.on_cancel is not None:
            self.on_cancel()


_job: ContextVar[JobContext | None] = ContextVar("dbqueue_job", default=None)


def current_job() -> JobContext | None:
    """The job that this thread executes at the moment; None outside of a worker."""
    return _job.get()


def enter(context: JobContext) -> Token[JobContext | None]:
    """From here to ``leave``, ``context`` is the current job of this thread or task."""
    return _job.set(context)


def leave(token: Token[JobContext | None]) -> None:
    _job.reset(token)


class Port(Generic[T]):
    """A dependency of handlers that tests replace: ``mailer = Port("mailer", make_mailer)``, then ``mailer.get().send(...)``.

    Made on first use in the process that executes jobs, once; never by enqueueing (D4). ``dbqueue.testing`` sets a fake (D21)."""

    def __init__(self, name: str, make: Callable[[], T]) -> None:
        self.name, self._make = check_name("target", name), make
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._fakes: list[T] = []

    def get(self) -> T:
        if self._fakes:
            return self._fakes[-1]
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    @contextmanager
    def replaced(self, fake: T) -> Iterator[T]:
        """``fake`` answers ``get`` until the block ends; the real one is not made."""
        self._fakes.append(fake)
        try:
            yield fake
        finally:
            del self._fakes[next(i for i, f in enumerate(self._fakes) if f is fake)]  # equal ones are not the same one
