"""An outbox in the place of a target: the worker delivers its messages with everything that it has for jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dbqueue.database.tables import NewJob
from dbqueue.errors import LostClaim, NotSupported
from dbqueue.outbox import POLICY, OutboxMessage, check_deliver, queue_of
from dbqueue.payload import any_json
from dbqueue.runtime.context import current_job
from dbqueue.states import State
from dbqueue.targets import JobRef, Target

Deliver = Callable[[OutboxMessage], object]


@dataclass(frozen=True)
class Delivery:
    """One outbox that a worker delivers, and with what. ``module`` and ``attribute``: where a child process finds ``deliver``."""

    outbox: str
    deliver: Deliver
    module: str
    attribute: str

    def target(self) -> OutboxTarget:
        """Raises InvalidName, ReservedName, InvalidArgument."""
        return OutboxTarget(queue_of(self.outbox), self.deliver, (self.module, self.attribute))


class _Nowhere:
    """Messages are written by ``Outbox.enqueue``."""

    def write(self, jobs: Sequence[NewJob]) -> list[JobRef]:
        raise NotSupported("a worker's outbox target enqueues nothing: call queue.outbox(name).enqueue(...)")


class OutboxTarget(Target[Any]):
    """``deliver`` may be ``async def`` here. A message that was delivered ends as acked, as after ``run_once``."""

    done: ClassVar[State] = State.ACKED

    def __init__(self, name: str, deliver: Deliver, address: tuple[str, str]) -> None:
        check_deliver(deliver)
        self.address = address

        def handler(payload: Any) -> object:
            return deliver(_message(payload))

        super().__init__(name, handler, any_json(name), replace(POLICY, queue=name), _Nowhere())
        self.is_async = inspect.iscoroutinefunction(deliver)


def _message(payload: Any) -> OutboxMessage:
    job = current_job()
    assert job is not None

    def beat() -> None:
        if job.cancelled:
            raise LostClaim(
                f"message {job.id}: attempt {job.attempt} must end here; it is delivered again unless it was cancelled"
            )
        job.beat()

    return OutboxMessage(job.id, payload, job.attempt, job.max_attempts, beat)
