"""What a task sees of its own run (``self.request``), and what it raises to say how its job goes on."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery_bridge.calls import Call
from dbqueue.errors import GoOn

log = logging.getLogger("dbqueue.jobs")
_told: set[str] = set()
"""Tasks whose soft time limit was told to be without effect."""


class Retry(GoOn):
    """The task runs again, as the same job: what ``self.retry`` raises or returns. ``when``: seconds, or an instant."""

    def __init__(
        self,
        message: str = "",
        exc: BaseException | None = None,
        when: float | datetime | None = None,
        *,
        call: Call | None = None,
        is_eager: bool = False,
        payload: bytes = b"",
        delay: float = 0.0,
    ) -> None:
        super().__init__(message, payload, delay=delay)
        self.exc, self.when, self.call, self.is_eager = exc, when, call, is_eager


class TaskError(Exception):
    """The root of what a task's own run raises."""


class MaxRetriesExceededError(TaskError):
    """``self.retry`` was called after the last retry, without an ``exc`` to raise instead. The job is dead."""


class SoftTimeLimitExceeded(Exception):
    """The soft time limit of the task has passed; it may clean up until the hard one."""


class Ignore(TaskError):
    """Raised by a task: it ends here, and nothing is wrong."""


class Reject(TaskError):
    """Raised by a task: the job is dead now, or with ``requeue`` runs again at once, which costs one of its ``max_crashes``."""

    def __init__(self, reason: object = None, requeue: bool = False) -> None:
        super().__init__(reason, requeue)
        self.reason, self.requeue = reason, requeue


@dataclass(eq=False)
class Request:
    """One run of a task, with Celery's names. Outside of a run it says ``called_directly``. A header that the caller gave is an
    attribute too. What belongs to canvas and results is None."""

    id: str | None = None
    task: str | None = None
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    retries: int = 0
    headers: dict[str, Any] | None = None
    delivery_info: dict[str, Any] | None = None
    eta: str | None = None
    expires: str | None = None
    timelimit: tuple[float | None, float | None] | None = None
    hostname: str = field(default_factory=socket.gethostname)
    is_eager: bool = False
    called_directly: bool = True
    ignore_result: bool = True
    utc: bool = True
    parent_id: str | None = None
    chain: None = None
    chord: None = None
    group: None = None
    group_index: None = None
    callbacks: None = None
    errbacks: None = None
    reply_to: None = None
    call: Call | None = field(default=None, repr=False)
    again: Retry | None = field(default=None, repr=False)
    """What ``self.retry`` said: it counts whatever the task does afterwards."""

    @property
    def root_id(self) -> str | None:
        return self.id

    @property
    def correlation_id(self) -> str | None:
        return self.id

    def __getattr__(self, name: str) -> Any:
        headers = self.__dict__.get("headers") or {}
        if name in headers:
            return headers[name]
        raise AttributeError(f"the request has no {name!r}")

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@contextmanager
def soft_limit(task: str, seconds: float | None) -> Iterator[None]:
    """Raises SoftTimeLimitExceeded in the block after so many seconds. Only the main thread of a process can be interrupted, which
    is where process slots run their jobs; in a thread the limit is told to be without effect."""
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        if task not in _told:
            _told.add(task)
            log.warning("task %s: its soft time limit needs process slots (-P processes); it has none here", task)
        yield
        return
    active = True

    def ring(*_: object) -> None:
        if active:
            raise SoftTimeLimitExceeded(f"{seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
