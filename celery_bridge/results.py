"""What ``delay`` and ``apply`` return. A job has no stored result: there are its id and its state."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar
from uuid import UUID

from dbqueue.errors import NotSupported
from dbqueue.queue import DBQueue
from dbqueue.states import Kind
from dbqueue.views import JobRecord

R = TypeVar("R")

_STATES = {
    "pending": "PENDING", "running": "STARTED", "blocked": "BLOCKED", "unknown": "UNKNOWN", "succeeded": "SUCCESS", "acked": "SUCCESS",
    "dead": "FAILURE", "discarded": "FAILURE", "cancelled": "REVOKED",
}  # fmt: skip


class AsyncResult(Generic[R]):
    """A call that was written. ``id`` is the task's id, ``job_id`` that of the job (None: no job has this task id).

    ``duplicate``: an unfinished job with the same ``key`` was there already, and this is that one; None: not known before the async
    session's commit."""

    def __init__(self, queue: DBQueue, id: str, job_id: UUID | None, duplicate: bool | None = False) -> None:
        self._queue, self.id, self.job_id, self.duplicate = queue, id, job_id, duplicate

    task_id = property(lambda self: self.id)

    @property
    def record(self) -> JobRecord | None:
        """The job's record; None when there is none (any more)."""
        return None if self.job_id is None else self._queue.get_job(self.job_id)

    @property
    def state(self) -> str:
        """PENDING, STARTED, RETRY, SUCCESS, FAILURE or REVOKED, as the database says now; PENDING, too, for a job that is not there.
        Beside Celery's states there are BLOCKED and UNKNOWN: kept until somebody decides."""
        record = self.record
        if record is None:
            return "PENDING"
        if record.state == "pending" and record.attempt and record.error_kind == Kind.FAILED.value:
            return "RETRY"
        return _STATES[record.state]

    status = state

    def ready(self) -> bool:
        return self.state in ("SUCCESS", "FAILURE", "REVOKED")

    def successful(self) -> bool:
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        return self.state == "FAILURE"

    def get(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotSupported: what a task returns is not stored."""
        raise NotSupported(
            f"task {self.id}: what a task returns is not stored, so there is nothing to get; read .state, and write results where "
            "they belong, in the task's own transaction"
        )

    wait = get
    collect = get
    then = get
    result = property(get)
    info = property(get)
    traceback = property(get)

    def revoke(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotSupported."""
        raise NotSupported(f"task {self.id}: cancel its job with queue.cancel(result.job_id)")

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"<AsyncResult: {self.id}>"


class EagerResult(Generic[R]):
    """What a task that ran here and now came to."""

    def __init__(self, id: str, result: R | BaseException | None, state: str, traceback: str | None = None) -> None:
        self.id, self.result, self.state, self.traceback = id, result, state, traceback

    status = property(lambda self: self.state)
    task_id = property(lambda self: self.id)

    def get(self, timeout: float | None = None, propagate: bool = True, **options: Any) -> R:
        """What the task returned; raises what it raised, unless ``propagate`` is false: then that is returned."""
        if propagate and self.state == "FAILURE" and isinstance(self.result, BaseException):
            raise self.result
        return self.result  # type: ignore[return-value]

    wait = get

    def ready(self) -> bool:
        return True

    def successful(self) -> bool:
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        return self.state == "FAILURE"

    def __repr__(self) -> str:
        return f"<EagerResult: {self.id}>"
