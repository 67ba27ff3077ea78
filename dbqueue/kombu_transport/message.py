"""A message as a job row and back: the body is the payload as it is, everything else is the head, a JSON document."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from kombu.utils.json import dumps, loads

from dbqueue import clock, ids
from dbqueue.database.tables import BEST_PRIORITY, NewJob
from dbqueue.mail import Item
from dbqueue.settings import MAX_NAME, RESERVED_PREFIX

TARGET = f"{RESERVED_PREFIX}message"
UNLIMITED = 2**31 - 1
"""Attempts of a message: a requeue after a start counts one, but never ends it."""
TRANSIENT = 1


AMQP_PROPERTIES = frozenset(
    {
        "delivery_mode", "priority", "correlation_id", "reply_to", "expiration", "message_id", "timestamp", "type", "user_id", "app_id",
        "cluster_id",
    }
)  # fmt: skip


def head_of(message: dict[str, Any], exchange: str, routing_key: str) -> bytes:
    """Raises TypeError for headers that JSON cannot hold. Of properties that it cannot hold only AMQP's own are kept, as AMQP does:
    whatever a caller hands to ``publish`` becomes one."""
    properties = {name: value for name, value in message["properties"].items() if name != "delivery_info"}
    head = {
        "type": message.get("content-type"), "encoding": message.get("content-encoding"), "headers": message.get("headers") or {},
        "properties": properties, "exchange": exchange, "routing_key": routing_key,
    }  # fmt: skip
    try:
        return dumps(head).encode()
    except TypeError:
        head["properties"] = {name: value for name, value in properties.items() if name in AMQP_PROPERTIES}
        return dumps(head).encode()


def body_of(message: dict[str, Any]) -> bytes:
    body = message.get("body")
    if body is None:
        return b""
    return body.encode() if isinstance(body, str) else bytes(body)


def payload_of(head: bytes, body: bytes, tag: int, *, redelivered: bool) -> dict[str, Any]:
    """What ``virtual.Message`` is made of."""
    told = loads(head.decode())
    info = {"exchange": told["exchange"], "routing_key": told["routing_key"], "redelivered": redelivered}
    if (priority := told["properties"].get("priority")) is not None:
        info["priority"] = priority
    return {
        "body": body, "content-type": told["type"], "content-encoding": told["encoding"], "headers": told["headers"],
        "properties": told["properties"] | {"delivery_tag": tag, "delivery_info": info},
    }  # fmt: skip


def is_transient(message: dict[str, Any]) -> bool:
    return bool(message["properties"].get("delivery_mode") == TRANSIENT)


def ttl_us(message: dict[str, Any]) -> int | None:
    """The message's own time to live, in microseconds: AMQP's ``expiration``, a text of milliseconds."""
    expiration = message["properties"].get("expiration")
    try:
        return None if expiration is None else max(0, int(float(expiration) * 1_000))
    except (TypeError, ValueError, OverflowError):
        return None


def stored_priority(message: dict[str, Any], *, redis: bool) -> int:
    """Smaller is better, from 0 to 9, as the table has it."""
    try:
        priority = max(0, min(BEST_PRIORITY, int(message["properties"].get("priority") or 0)))
    except (TypeError, ValueError):
        priority = 0
    return priority if redis else BEST_PRIORITY - priority


def revoked_by(body: bytes) -> list[str]:
    """The task ids of a broadcast ``revoke``; none for every other body, and for one that is meant for some workers only."""
    if b'"revoke"' not in body:
        return []
    try:
        told = loads(body.decode())
        if told.get("method") != "revoke" or told.get("destination"):
            return []
        ids_given = told["arguments"]["task_id"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    given = ids_given if isinstance(ids_given, (list, tuple)) else [ids_given]
    return [task_id for task_id in given if isinstance(task_id, str)]


def rank_of(letter: Item) -> int:
    """A short-lived message's place among those that come with it; smaller is better. What cannot be read comes last."""
    try:
        return stored_priority(loads(letter.head.decode()), redis=False)
    except (ValueError, KeyError, TypeError, AttributeError):
        return BEST_PRIORITY


def job_of(
    message: dict[str, Any],
    queue: str,
    head: bytes,
    body: bytes,
    *,
    queue_ttl_ms: int | None,
    eta_lead: float,
    redis: bool,
) -> NewJob:
    headers = message.get("headers") or {}
    task, task_id = headers.get("task"), headers.get("id")
    ttls = [ttl for ttl in (ttl_us(message), None if queue_ttl_ms is None else queue_ttl_ms * 1_000) if ttl is not None]
    return NewJob(
        id=ids.new_id(),
        target=f"{TARGET}.{task}"[:MAX_NAME] if isinstance(task, str) else TARGET,
        queue=queue,
        payload=body,
        max_attempts=UNLIMITED,
        priority=stored_priority(message, redis=redis),
        run_at=_run_at(headers.get("eta"), eta_lead),
        task_id=task_id if isinstance(task_id, str) else None,
        head=head,
        ttl=min(ttls, default=None),
    )


EAST = timedelta(hours=14)
"""How far ahead of UTC the clocks of the first zone are."""


def _run_at(eta: Any, lead: float) -> int | None:
    """An ETA waits in the database; a worker gets it ``lead`` seconds early, to show it and to be punctual. One without a zone is in
    the zone of the worker's app, which is not known here: it waits only for as long as it cannot be due anywhere."""
    if not isinstance(eta, (str, datetime)):
        return None
    try:
        when = eta if isinstance(eta, datetime) else datetime.fromisoformat(eta.replace("Z", "+00:00"))
    except ValueError:
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc) - EAST
    return clock.to_instant(when) - round(lead * clock.SECOND)
