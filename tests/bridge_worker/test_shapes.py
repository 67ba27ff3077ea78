"""Messages whose parts are of other shapes than Celery writes: anybody may send one (C6)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tests.bridge_worker.projects import Project

pytestmark = pytest.mark.req("C6")

Make = Callable[..., Project]
SECRET = "s3cret"
MISSING = object()
COUNT = count()

RAN = ("succeeded", None)
FAILED, TIMEOUT, EXPIRED = ("dead", "failed"), ("dead", "timeout"), ("cancelled", "expired")
CORRUPT, UNKNOWN = ("blocked", "corrupt_payload"), ("blocked", "unknown_target")


def message(
    args: Any = (1, 2), kwargs: Any = None, embed: Any = None, *, whole: Any = MISSING, task: Any = "proj.add",
    properties: dict[str, Any] | None = None, **headers: Any,
) -> tuple[bytes, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Body, headers and properties. ``whole``: the body, if it is another thing. A header that is MISSING is not there."""
    body = [args, {} if kwargs is None else kwargs, {} if embed is None else embed] if whole is MISSING else whole
    told = {"lang": "py", "task": task, "id": f"id {next(COUNT)}", "argsrepr": SECRET, **headers}
    return json.dumps(body).encode(), {k: v for k, v in told.items() if v is not MISSING}, properties or {}


def old(**body: Any) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Of task protocol 1."""
    told = {"task": "proj.add", "id": f"id {next(COUNT)}", "args": [1, 2], "kwargs": {}, **body}
    return json.dumps(told).encode(), {}, {}


ODD: dict[str, Any] = {
    "a text": SECRET, "three": [1, 2, [SECRET]], "negative": -1, "huge": 10**400, "nested": {"a": {"b": [SECRET]}}, "true": True,
    "empty": [],
}  # fmt: skip

CASES: dict[str, tuple[tuple[bytes, dict[str, Any], dict[str, Any]], tuple[str, str | None]]] = {
    **{f"eta: {odd}": (message(eta=value), CORRUPT) for odd, value in ODD.items()},
    "eta: none": (message(eta=None), RAN),
    "eta: the first of all dates": (message(eta="0001-01-01T00:00:00"), RAN),
    "eta: in no zone": (message(eta="2020-01-01T00:00:00+99:00"), CORRUPT),
    **{f"expires: {odd}": (message(expires=value), CORRUPT) for odd, value in ODD.items()},
    "expires: the first of all dates": (message(expires="0001-01-01T00:00:00"), EXPIRED),
    "expires: the last of all dates": (message(expires="9999-12-31T23:59:59"), RAN),
    **{f"time limits: {odd}": (message(timelimit=value), RAN) for odd, value in ODD.items()},
    "time limits: negative, hard": (message(["n"], task="proj.hard", timelimit=-1), TIMEOUT),
    "time limits: nested in two": (message(timelimit=[{"a": SECRET}, [1]]), RAN),
    **{f"{name}: {odd}": (message(**{name: value}), RAN)
       for name in ("retries", "headers", "group", "root_id", "parent_id", "argsrepr", "stamps") for odd, value in ODD.items()},
    **{f"retries: {odd}, retried": (message(["n", 1], task="proj.again", retries=value), FAILED) for odd, value in ODD.items()
       if not isinstance(value, int)},
    "stamped by a text": (message(stamped_headers=-1), CORRUPT),
    "stamped by what is no name": (message(stamped_headers=[[SECRET]]), CORRUPT),
    "stamps: a list": (message(stamped_headers=["a"], stamps=[SECRET]), CORRUPT),
    "id: missing": (message(id=MISSING), CORRUPT),
    "id: a list": (message(id=[SECRET]), CORRUPT),
    "id: a number": (message(id=5), RAN),
    "task: missing": (message(task=MISSING), UNKNOWN),
    "task: a number": (message(task=5), UNKNOWN),
    **{f"body: {json.dumps(body)}": (message(whole=body), CORRUPT) for body in (
        5, None, SECRET, [], {}, [1], [[1, 2], {}], [[1, 2], {}, {}, SECRET], {"args": [1, 2]}, [1, 2, 3])},
    "arguments: a number": (message(5), FAILED),
    "arguments: missing": (message([]), FAILED),
    **{f"keywords: {odd}": (message(kwargs=ODD[odd]), CORRUPT) for odd in ("a text", "three", "negative", "empty")},
    "keywords: unknown": (message(kwargs={SECRET[:3]: 1}), FAILED),
    **{f"embed: {odd}": (message(embed=ODD[odd]), CORRUPT) for odd in ("a text", "three", "negative")},
    **{f"callbacks: {odd}": (message(embed={"callbacks": ODD[odd]}), FAILED) for odd in ("a text", "three", "negative", "nested")},
    **{f"chain: {odd}": (message(embed={"chain": ODD[odd]}), FAILED) for odd in ("three", "negative", "true")},
    **{f"chord: {odd}": (message(embed={"chord": ODD[odd]}, group="a group"), RAN) for odd in ODD},
    **{f"error callbacks: {odd}": (message(["n"], task="proj.fail", embed={"errbacks": ODD[odd]}), FAILED) for odd in ODD},
    "error callbacks: a number, of a hard limit": (message(["n"], task="proj.hard", embed={"errbacks": 5}), TIMEOUT),
    "kind: unknown": (message(properties={"content_type": "application/nonsense"}), CORRUPT),
    "kind: not accepted": (message(properties={"content_type": "application/x-yaml"}), CORRUPT),
    "kind: a list": (message(properties={"content_type": [SECRET]}), CORRUPT),
    "encoding: unknown": (message(properties={"content_encoding": "klingon"}), RAN),
    "encoding: a number": (message(properties={"content_encoding": 5}), CORRUPT),
    "time to live: for ever": (message(properties={"expiration": 1e300}), RAN),
    "time to live: negative": (message(properties={"expiration": -5}), EXPIRED),
    "priority: a text": (message(properties={"priority": SECRET}), RAN),
    "correlation: nested": (message(properties={"correlation_id": [SECRET], "reply_to": {"a": 1}}), RAN),
    **{f"old, arguments: {odd}": (old(args=ODD[odd]), FAILED) for odd in ("a text", "three", "negative")},
    **{f"old, keywords: {odd}": (old(kwargs=ODD[odd]), CORRUPT) for odd in ("a text", "three", "negative")},
    **{f"old, eta: {odd}": (old(eta=ODD[odd]), CORRUPT) for odd in ("a text", "three", "negative", "nested")},
    "old, id: a number": (old(id=5), UNKNOWN),
    "old, task: a list": (old(task=[SECRET]), UNKNOWN),
}  # fmt: skip


def test_messages_of_wrong_shapes_end_and_harm_nobody(make_project: Make) -> None:
    """Each ends with its first run, as a task that failed or as a row that is kept; or it runs, as with Celery's worker."""
    project = make_project()
    with project.app.connection_for_write() as connection:
        queue = project.app.amqp.queues["proj"](connection.default_channel)
        queue.declare()
        for (body, headers, properties), _ in CASES.values():
            options = {"content_type": "application/json", "content_encoding": "utf-8", **properties}
            connection.Producer(queue.channel).publish(body, routing_key="proj", headers=headers, **options)
    names = dict(zip(sorted(row.id for row in project.queue.jobs(limit=1_000)), CASES, strict=True))
    worker = project.worker("-E")
    project.idle()
    found = {names[row.id]: row for row in project.queue.jobs(limit=1_000) if row.id in names}
    assert {name: (row.state, row.error_kind) for name, row in found.items()} == {
        name: end for name, (_, end) in CASES.items()
    }
    assert not [name for name, row in found.items() if row.attempt > 1 or row.lapses]
    assert project.value("add", 20, 22) == 42
    log = project.stop(worker)
    assert not [line for line in log.splitlines() if SECRET in line]
    assert "its process ended" not in log
    assert "events cannot be sent" not in log
