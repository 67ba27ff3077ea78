"""A message as a job row and back: the body is the payload as it is, everything else is the head, a JSON document."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
from kombu.exceptions import SerializationError
from kombu.message import Message
from kombu.serialization import dumps as encode
from kombu.serialization import loads as decode
from kombu.serialization import prepare_accept_content, registry
from kombu.utils.json import dumps, loads

from dbqueue import clock, ids
from dbqueue.database.tables import BEST_PRIORITY, NewJob
from dbqueue.mail import Item
from dbqueue.routing import Waiting
from dbqueue.settings import MAX_NAME, RESERVED_PREFIX

TARGET = f"{RESERVED_PREFIX}message"
NOTICE = f"{RESERVED_PREFIX}revoked"
UNLIMITED = 2**31 - 1
"""Attempts of a message: a requeue after a start counts one, but never ends it."""
TRANSIENT = 1
LONGEST_TTL = 10**17
"""Microseconds, some three thousand years: an instant must fit into its column."""

AMQP_PROPERTIES = frozenset(
    {
        "delivery_mode", "priority", "correlation_id", "reply_to", "expiration", "message_id", "timestamp", "type", "user_id", "app_id",
        "cluster_id",
    }
)  # fmt: skip

OF_A_DELIVERY = frozenset({"body_encoding", "delivery_info", "delivery_tag"})
"""Properties that say how one broker delivered a message. Whoever publishes it again (`celery migrate`) hands them over with the
others, and here they are not true: the body is stored as it is, not in base64."""


def head_of(message: dict[str, Any], exchange: str, routing_key: str, **more: Any) -> bytes:
    """Raises TypeError for headers that JSON cannot hold. Of properties that it cannot hold only AMQP's own are kept, as AMQP does:
    whatever a caller hands to ``publish`` becomes one."""
    properties = {name: value for name, value in message["properties"].items() if name not in OF_A_DELIVERY}
    head = {
        "type": message.get("content-type"), "encoding": message.get("content-encoding"), "headers": message.get("headers") or {},
        "properties": properties, "exchange": exchange, "routing_key": routing_key, **more,
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


def _told(head: bytes) -> Any:
    """What stands in a head. Raises ValueError. Kombu's own types are written as objects with this name in them."""
    if b'"__type__"' not in head:
        try:
            return msgspec.json.decode(head)
        except msgspec.MsgspecError:  # what the other reader may take all the same: NaN, a lone surrogate
            pass
    return loads(head.decode())


def payload_of(head: bytes, body: bytes, tag: int, *, redelivered: bool) -> dict[str, Any]:
    """What ``virtual.Message`` is made of."""
    told = _told(head)
    info = {"exchange": told["exchange"], "routing_key": told["routing_key"], "redelivered": redelivered}
    if (priority := told["properties"].get("priority")) is not None:
        info["priority"] = priority
    return {
        "body": body, "content-type": told["type"], "content-encoding": told["encoding"], "headers": told["headers"],
        "properties": told["properties"] | {"delivery_tag": tag, "delivery_info": info},
    }  # fmt: skip


def target_of(task: str) -> str:
    """The target of the rows that hold messages of a task."""
    return f"{TARGET}.{task}"[:MAX_NAME]


def notice_target_of(task: str) -> str:
    """The same of notices that one was revoked."""
    return f"{NOTICE}.{task}"[:MAX_NAME]


def incoming(head: bytes, body: bytes, *, redelivered: bool, accept: Any) -> Message:
    """A row as a kombu message that no channel has delivered: nobody acknowledges it."""
    told = payload_of(head, body, 0, redelivered=redelivered)
    properties = told["properties"]
    info = properties.pop("delivery_info")
    properties.pop("delivery_tag")
    return Message(
        body=told["body"], content_type=told["content-type"], content_encoding=told["content-encoding"], delivery_info=info,
        properties=properties, headers=told["headers"], accept=prepare_accept_content(accept),
    )  # fmt: skip


def rewritten(head: bytes, message: Message, headers: dict[str, Any], body: Any) -> tuple[bytes, bytes]:
    """Head and body of the same message with other headers and another body, by the same serializer. Raises what that raises."""
    told = loads(head.decode())
    kind, encoding, data = encode(body, serializer=registry.type_to_name[message.content_type])
    other = {"content-type": kind, "content-encoding": encoding, "headers": headers, "properties": told["properties"]}
    return head_of(other, told["exchange"], told["routing_key"]), body_of({"body": data})


def eta_of(head: bytes) -> tuple[int | None, Any]:
    """When the message's task is due, as an instant (None: at once, or in the zone of an app that is to tell), and what was written."""
    eta = headers_of(head).get("eta")
    return _run_at(eta, 0.0), eta


@functools.lru_cache(maxsize=4)
def headers_of(head: bytes) -> Mapping[str, Any]:
    """The headers of a message; none, if they cannot be read. A worker asks for this and that of them before it begins."""
    try:
        headers = _told(head)["headers"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return headers if isinstance(headers, dict) else {}


def has_expiry(head: bytes) -> bool:
    """Whether the message's task has a time after which it is not to run."""
    return headers_of(head).get("expires") is not None


def time_limits_of(head: bytes) -> tuple[float | None, float | None]:
    """Hard and soft, in seconds, as the call said them."""
    try:
        hard, soft = headers_of(head)["timelimit"]
    except (ValueError, KeyError, TypeError):
        return None, None
    return _limit(hard), _limit(soft)


def _limit(seconds: Any) -> float | None:
    """Anybody may have written it: a worker counts with it."""
    usable = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < 1e9
    return seconds if usable else None


def is_transient(message: dict[str, Any]) -> bool:
    return bool(message["properties"].get("delivery_mode") == TRANSIENT)


def ttl_us(message: dict[str, Any]) -> int | None:
    """The message's own time to live, in microseconds: AMQP's ``expiration``, a text of milliseconds."""
    expiration = message["properties"].get("expiration")
    try:
        return None if expiration is None else max(0, min(int(float(expiration) * 1_000), LONGEST_TTL))
    except (TypeError, ValueError, OverflowError):
        return None


def stored_priority(message: dict[str, Any], *, redis: bool) -> int:
    """Smaller is better, from 0 to 9, as the table has it."""
    try:
        priority = max(0, min(BEST_PRIORITY, int(message["properties"].get("priority") or 0)))
    except (TypeError, ValueError):
        priority = 0
    return priority if redis else BEST_PRIORITY - priority


def is_control(exchange: str) -> bool:
    """Whether remote control goes through it."""
    return exchange.endswith(".pidbox") and not exchange.startswith("reply.")


@dataclass(frozen=True)
class Revoke:
    """What a broadcast revokes: tasks by their ids, or all that carry one of these stamps (header and value)."""

    task_ids: frozenset[str] = frozenset()
    stamps: frozenset[str] = frozenset()
    """Each as ``stamp`` writes it."""

    @property
    def keys(self) -> frozenset[str]:
        return self.task_ids | self.stamps


def revoked_by(message: dict[str, Any]) -> Revoke | None:
    """What Celery's ``control.revoke``, ``terminate`` or ``revoke_by_stamped_headers`` says to all workers; None for every other
    message, and for one that is meant for some workers only."""
    body = body_of(message)
    if b"revoke" not in body and b"terminate" not in body:
        return None
    kind = message.get("content-type")
    try:  # this process has just written it, whatever the serializer
        told = decode(body, kind, message.get("content-encoding") or "utf-8", accept=[kind])
        if told.get("destination") or told.get("pattern"):
            return None
        arguments = told["arguments"]
        if told["method"] in ("revoke", "terminate"):
            task_ids = _several(arguments["task_id"])
            return Revoke(task_ids=frozenset(task_id for task_id in task_ids if isinstance(task_id, str)))
        if told["method"] == "revoke_by_stamped_headers":
            headers = arguments["headers"]
            if not isinstance(headers, dict):  # as the command line sends them
                headers = dict(pair.split("=", 1) for pair in headers)
            return Revoke(stamps=frozenset(stamps_of(headers)))
    except (SerializationError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def stamps_of(headers: dict[str, Any]) -> Iterator[str]:
    """Each header with each of its values, as JSON."""
    for header, values in headers.items():
        for value in _several(values):
            with suppress(TypeError):
                yield dumps([header, value])


def stamp_of(key: str) -> tuple[str, Any]:
    header, value = loads(key)
    return header, value


STAMPED = b'"stamps": {"'
"""In the head of every task that carries a stamp."""


def stamps_in(head: bytes) -> frozenset[str]:
    """The stamps that a task's message carries."""
    if STAMPED not in head:
        return frozenset()
    try:
        return frozenset(stamps_of(loads(head.decode())["headers"]["stamps"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return frozenset()


def task_id_of(head: bytes) -> str | None:
    task_id = headers_of(head).get("id")
    return task_id if isinstance(task_id, str) else None


def notice_of(waiting: Waiting) -> NewJob:
    """The message of a task that ended cancelled, for a worker to tell it: the result is stored, a chord hears of it, an event is
    sent. No worker executes it, and it carries no task id: the record of the task is the cancelled one."""
    return NewJob(
        id=ids.new_id(),
        target=f"{NOTICE}{waiting.target.removeprefix(TARGET)}"[:MAX_NAME],
        queue=waiting.queue,
        payload=waiting.payload,
        max_attempts=UNLIMITED,
        head=waiting.head,
    )


def rank_of(letter: Item) -> int:
    """A short-lived message's place among those that come with it; smaller is better. What cannot be read comes last."""
    try:
        return stored_priority(loads(letter.head.decode()), redis=False)
    except (ValueError, KeyError, TypeError, AttributeError):
        return BEST_PRIORITY


def id_of(letter: Item) -> bytes:
    """Its place in time among all that the same process has published; what has none comes first."""
    try:
        return bytes.fromhex(loads(letter.head.decode())["id"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ids.ZERO


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
        target=target_of(task) if isinstance(task, str) else TARGET,
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
        when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc) - EAST
    except (ValueError, OverflowError):  # no date, or one before there were any: it is long due
        return None
    return clock.to_instant(when) - round(lead * clock.SECOND)
