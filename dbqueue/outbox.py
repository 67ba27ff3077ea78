"""The outbox: messages for the world outside, written with your data and delivered after its commit (A6).

An outbox is a queue under a name that nothing else can reach; so whatever is in it was written by ``enqueue`` here, with the policy
of outboxes: 60 seconds for a delivery, five of them, five seconds apart. ``run_once`` delivers in a program of your own; the worker
(``dbqueue worker --outbox``) does with its own machinery, under the same policy.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from dbqueue import clock, ids
from dbqueue.claimed import ClaimedJob
from dbqueue.database.tables import DEFAULT_PRIORITY, NewJob, stored_priority
from dbqueue.errors import Bury, InvalidArgument, InvalidName, QueueError, RetryLater
from dbqueue.payload import CorruptPayload, any_json, encode_json
from dbqueue.retry import Delays
from dbqueue.settings import MAX_NAME, RESERVED_PREFIX, check_key, check_name
from dbqueue.states import OnCrash
from dbqueue.targets import JobRef, Policy, Writer, _when, told, wish

log = logging.getLogger("dbqueue.jobs")

PREFIX = f"{RESERVED_PREFIX}outbox."
LEASE, ATTEMPTS, BACKOFF = 60.0, 5, 5.0
"""Seconds that a delivery may take without a heartbeat, deliveries before a message is dead, seconds between them."""


class OutboxMessage:
    """What ``deliver`` gets: ``id`` (the same in each attempt: an idempotency key for the receiver), the ``payload`` as it was
    enqueued, ``attempt`` (from 1) of ``max_attempts``."""

    __slots__ = ("_beat", "attempt", "id", "max_attempts", "payload")

    def __init__(
        self, message_id: UUID, payload: Any, attempt: int, max_attempts: int, beat: Callable[[], None]
    ) -> None:
        self.id, self.payload, self.attempt, self.max_attempts, self._beat = (
            message_id, payload, attempt, max_attempts, beat,
        )  # fmt: skip

    def heartbeat(self) -> None:
        """Another 60 seconds from now; nothing else prolongs a delivery. Raises LostClaim when it is not yours any more, or the
        worker must stop: leave off, it is made again."""
        self._beat()

    def __repr__(self) -> str:
        return f"<OutboxMessage {self.id} attempt {self.attempt}/{self.max_attempts}>"


class _Queue(Writer, Protocol):
    """What an outbox asks of its DBQueue."""

    def take(self, queue: str, worker: str, lease: int, backoff: float) -> ClaimedJob | None: ...


class Outbox:
    """Made by ``queue.outbox(name)``. Thread-safe."""

    def __init__(self, queue: _Queue, name: str) -> None:
        self.name, self.queue_name, self._queue = name, queue_of(name), queue
        self._fingerprint = any_json(self.queue_name).fingerprint

    @told("enqueue()", "outbox.enqueue(payload, key=..., delay=...)")
    def enqueue(
        self, payload: Any, *, key: str | None = None, delay: float | None = None, run_at: datetime | None = None
    ) -> JobRef:
        """Writes one message, any JSON value: in the caller's transaction inside ``dbqueue.using(...)``, else in a short one of its
        own that has committed when this returns. It is delivered at least once, not before ``delay`` seconds or ``run_at``. At most
        one unfinished message of the outbox has ``key``. Raises InvalidArgument, EnqueueFailed, ConnectionLost, DatabaseBusy."""
        data = encode_json(f"outbox {self.name!r}", payload)
        at, wait = _when(run_at, delay)
        job = NewJob(
            id=ids.new_id(), target=self.queue_name, queue=self.queue_name, payload=data, fingerprint=self._fingerprint,
            max_attempts=ATTEMPTS, timeout_ms=POLICY.timeout_ms, priority=stored_priority(DEFAULT_PRIORITY), on_crash=POLICY.on_crash,
            key=None if key is None else check_key(key), run_at=at, delay=wait,
        )  # fmt: skip
        return self._queue.write([job])[0]

    def run_once(self, worker_id: str, deliver: Callable[[OutboxMessage], object]) -> bool:
        """Claims the message that is due first and calls ``deliver`` with it, in this thread. False: none is due.

        True: one was processed. If ``deliver`` returned, it is acked; if it raised, it is tried again after five seconds (or as
        RetryLater says), and dead after the fifth attempt or a Bury; the row keeps the error's class, the log all of it. When the
        message could not be settled, because ``deliver`` took longer than 60 seconds without a heartbeat, LostClaim is raised:
        it is delivered again, whatever this call did. So it is after ClaimBusy and ConnectionLost. KeyboardInterrupt and its like
        hand the message back, the attempt uncounted, and pass through; a process that dies leaves it to its 60 seconds."""
        check_deliver(deliver)
        if inspect.iscoroutinefunction(deliver):
            raise InvalidArgument(
                f"outbox {self.name!r}: deliver is a coroutine function, which run_once cannot wait for; give it a plain one, or "
                "let `dbqueue worker --outbox` deliver"
            )
        check_name("worker", worker_id)
        claimed = self._queue.take(self.queue_name, worker_id, round(LEASE * clock.SECOND), BACKOFF)
        if claimed is None:
            return False
        try:
            message = OutboxMessage(
                claimed.id, claimed.payload, claimed.attempt, claimed.max_attempts, claimed.heartbeat
            )
            _check_result(deliver(message))
        except Exception as error:
            log.warning(
                "message %s of outbox %s raised in attempt %d", claimed.id, self.name, claimed.attempt, exc_info=error
            )
            if isinstance(error, (Bury, CorruptPayload)):
                claimed.bury(error)
            else:
                delay = wish(error.delay) if isinstance(error, RetryLater) else None
                claimed.retry(error, None if delay is None else delay / clock.SECOND)
        except BaseException:
            with suppress(QueueError):  # or its lease ends
                claimed.release()
            raise
        else:
            claimed.ack()
        return True

    def __repr__(self) -> str:
        return f"<Outbox {self.name!r}>"


POLICY = Policy(
    max_attempts=ATTEMPTS, timeout_ms=round(LEASE * 1000), queue="", priority=DEFAULT_PRIORITY, on_crash=OnCrash.RETRY,
    retry=Delays((BACKOFF,)),
)  # fmt: skip
"""Stored with each message, and followed by a worker; the queue is the outbox's own."""


def queue_of(name: object) -> str:
    """The queue behind an outbox, and the target of its jobs. Raises InvalidName, ReservedName."""
    checked = check_name("outbox", name)
    longest = MAX_NAME - len(PREFIX)
    if len(checked) > longest:
        raise InvalidName(f"outbox name must have 1 to {longest} characters; it has {len(checked)}. Shorten it.")
    return PREFIX + checked


def check_deliver(deliver: object) -> None:
    if not callable(deliver) or hasattr(type(deliver), "__dbqueue_target__"):
        raise InvalidArgument(
            f"deliver must be a plain callable that takes an OutboxMessage; got {type(deliver).__name__}"
        )


def _check_result(result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("deliver returned a coroutine, so nothing was delivered")
