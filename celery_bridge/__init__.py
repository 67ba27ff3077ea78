"""Celery's call sites without Celery: functions declared as tasks, whose calls are dbqueue's jobs.

    queue = DBQueue("postgresql://shop@db/shop")
    bridge = Bridge(queue)

    @bridge.task(bind=True, max_retries=5)
    def send_receipt(self, order_id): ...

    with dbqueue.using(session):
        send_receipt.delay(order.id)        # commits with the order, or not at all

``dbqueue worker -A shop.jobs`` runs them, like every target of the queue. Neither Celery nor Kombu is imported, or needed. What
cannot be kept durable raises ``NotSupported``. docs/bridge.md says what is as in Celery and what is not.

Celery's exceptions that a task raises or meets are here under their names: Retry, MaxRetriesExceededError, SoftTimeLimitExceeded,
Ignore, Reject.
"""

from celery_bridge.bridge import Bridge, chain, chord, chunks, group, shared_task
from celery_bridge.declared import Task
from celery_bridge.request import (
    Ignore,
    MaxRetriesExceededError,
    Reject,
    Request,
    Retry,
    SoftTimeLimitExceeded,
    TaskError,
)
from celery_bridge.results import AsyncResult, EagerResult
from celery_bridge.signatures import Signature
from dbqueue.errors import InvalidPayload, NotSupported, UnknownTarget

__all__ = [
    "AsyncResult",
    "Bridge",
    "EagerResult",
    "Ignore",
    "InvalidPayload",
    "MaxRetriesExceededError",
    "NotSupported",
    "Reject",
    "Request",
    "Retry",
    "Signature",
    "SoftTimeLimitExceeded",
    "Task",
    "TaskError",
    "UnknownTarget",
    "chain",
    "chord",
    "chunks",
    "group",
    "shared_task",
]
