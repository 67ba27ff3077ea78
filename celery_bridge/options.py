"""The options of Celery's call sites and declarations: which are kept, which mean nothing here, and which cannot be kept.

An option that is left out, None or empty asks for nothing and is never refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from dbqueue.errors import InvalidArgument, NotSupported, QueueError


class CallOptions(TypedDict, total=False):
    """What ``apply_async`` takes beside the arguments. Times are in seconds; ``key`` is dbqueue's own: at most one unfinished job of
    the task has it."""

    countdown: float | None
    eta: datetime | str | None
    expires: float | datetime | str | None
    queue: str | None
    priority: int | None
    task_id: str | None
    headers: Mapping[str, Any] | None
    time_limit: float | None
    soft_time_limit: float | None
    key: str | None
    retry: bool | None
    retry_policy: Mapping[str, Any] | None
    ignore_result: bool | None
    serializer: str | None


class TaskOptions(TypedDict, total=False):
    """What a declaration takes beside ``bind``. Times are in seconds; ``on_crash`` and ``max_crashes`` are dbqueue's own."""

    name: str | None
    queue: str | None
    priority: int | None
    max_retries: int | None
    default_retry_delay: float
    autoretry_for: tuple[type[BaseException], ...]
    dont_autoretry_for: tuple[type[BaseException], ...]
    retry_kwargs: Mapping[str, Any] | None
    retry_backoff: bool | float
    retry_backoff_max: float
    retry_jitter: bool
    time_limit: float | None
    soft_time_limit: float | None
    expires: float | None
    on_crash: str
    max_crashes: int
    acks_late: bool | None
    reject_on_worker_lost: bool | None
    ignore_result: bool | None
    serializer: str | None
    typing: bool | None
    track_started: bool | None


NO_CANVAS = (
    "let the task call the next one's delay(...) as its last step, in using(...) with its own writes where it has any"
)
_NEXT = "let the task call the next one's delay(...) as its last step"
_QUEUE = "name a queue with queue="

_FIXED: dict[str, tuple[Any, str]] = {
    "acks_late": (True, 'a job is never acknowledged before it ran; on_crash="fail" runs it at most once'),
    "reject_on_worker_lost": (True, 'a job whose worker died runs again; on_crash="fail" ends it'),
    "acks_on_failure_or_timeout": (True, "a job that failed is kept as dead until somebody decides"),
    "ignore_result": (True, "results are not stored; write them where they belong, in the task's own transaction"),
    "serializer": ("json", "arguments are stored as JSON"),
    "typing": (True, "arguments are always checked against the signature"),
    "delivery_mode": (2, "every job is durable"),
}
"""Celery's options that have one value here."""

_QUIET = ("retry", "retry_policy", "track_started", "throws", "send_events", "trail", "add_to_parent", "lazy", "shared")
"""About Celery's messages, events and logs: nothing of a job depends on them."""

_CALL_REFUSED = {
    "link": _NEXT,
    "link_error": _NEXT,
    "chain": _NEXT,
    "chord": "count in your own table, and let the task that counts to the end call the next one",
    "group_id": "call each task's delay(...)",
    "group_index": "call each task's delay(...)",
    "shadow": "jobs have the name of their target",
    "exchange": _QUEUE,
    "routing_key": _QUEUE,
    "producer": "a job is written through the queue's own connection, or your transaction's in using(...)",
    "publisher": "a job is written through the queue's own connection, or your transaction's in using(...)",
    "connection": "a job is written through the queue's own connection, or your transaction's in using(...)",
    "compression": "arguments are stored as JSON",
    "stamped_headers": "use headers=",
    "reply_to": "nobody replies; write results where they belong, in the task's own transaction",
    "root_id": "a job has no family",
    "parent_id": "a job has no family",
    "expiration": "use expires=",
}
_TASK_REFUSED = {
    "base": "tasks have one class; put what they share into functions",
    "rate_limit": "start a worker with few slots for a queue of its own",
    "pydantic": "give model.model_dump(mode='json'), and validate it inside the task",
    "shadow_name": "jobs have the name of their target",
    "exchange": _QUEUE,
    "routing_key": _QUEUE,
    "compression": "arguments are stored as JSON",
    "before_start": "call it inside the task",
    "after_return": "call it inside the task",
    "on_success": "call it inside the task",
    "on_failure": "call it inside the task",
    "on_retry": "call it inside the task",
}


def call_options(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options of a call those that are kept. Raises InvalidArgument for an unknown one, NotSupported."""
    return _kept(what, given, CallOptions.__annotations__, _CALL_REFUSED, InvalidArgument)


def task_options(what: str, given: Mapping[str, Any], error: type[QueueError]) -> dict[str, Any]:
    """The same for a declaration. Raises ``error`` for an unknown one, NotSupported."""
    return _kept(what, given, TaskOptions.__annotations__, _TASK_REFUSED, error)


def _kept(
    what: str, given: Mapping[str, Any], known: Mapping[str, Any], refused: Mapping[str, str], unknown: type[QueueError]
) -> dict[str, Any]:
    kept = {}
    for name, value in given.items():
        if name in refused:
            if value is not None and value != () and value != [] and value is not False:
                raise NotSupported(f"{what}: {name}= cannot be kept durable here; {refused[name]}")
        elif name in _FIXED:
            only, remedy = _FIXED[name]
            if value is not None and value != only:
                raise NotSupported(f"{what}: {name}={only!r} is what there is; {remedy}")
        elif name in known and name not in _QUIET:
            kept[name] = value
        elif name not in _QUIET:
            nearest = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.0)[0]
            raise unknown(
                f"{what} has no option {name[:100]!r}. The nearest known name is {nearest}. Correct it or take it out"
            )
    return kept
