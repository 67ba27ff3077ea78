"""``dbqueue worker -A`` sends Celery's events (C6)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu
import psycopg
import pytest
from celery import Celery, __version__
from celery.events.event import get_exchange

from dbqueue import DBQueue
from tests.bridge_worker.steered import NODE, TASKS, Node, monitored, start
from tests.transport.conftest import broker_url, make_shop, queue
from tests.transport.shops import Shop
from tests.waiting import wait_for

__all__ = ["broker_url", "make_shop", "queue"]  # fixtures

pytestmark = [pytest.mark.timeout(180), pytest.mark.req("C6")]

MakeShop = Callable[..., Shop]


def test_its_events_are_those_of_a_celery_worker(make_shop: MakeShop, queue: DBQueue, broker_url: str) -> None:
    shop = make_shop(backend=broker_url, more=TASKS)
    with monitored(shop) as monitor:
        process = start(shop, "-E")
        node, app = Node(shop), shop.app
        online = monitor.wait_for("worker-online")
        assert online["hostname"] == NODE
        assert online["pid"] == process.pid
        assert online["sw_ver"] == __version__

        done = app.add.apply_async((1, 1), expires=datetime.now(timezone.utc) + timedelta(hours=1))
        failed, flaky, rejected = app.fail.delay(), app.flaky.delay("f"), app.reject.delay()
        late = app.add.apply_async((2, 2), expires=datetime.now(timezone.utc) - timedelta(hours=1))
        app.quiet.delay()
        shop.wait_for_note("quiet")
        running = app.slow.delay("long", 600)
        shop.wait_for_note("start long")
        waiting = app.add.delay(3, 3)
        heartbeat = monitor.wait_for("worker-heartbeat", active=1)
        assert heartbeat["processed"] >= 5
        assert len(heartbeat["loadavg"]) == 3
        assert heartbeat["freq"] == 2.0
        app.app.control.revoke(waiting.id)
        app.app.control.revoke(running.id, terminate=True, signal="SIGKILL")
        for result in (late, waiting, running):
            monitor.wait_for("task-revoked", uuid=result.id)
        monitor.wait_for("task-succeeded", uuid=flaky.id)

        received, started = "task-received", "task-started"
        assert monitor.of(done.id) == [received, started, "task-succeeded"]
        assert monitor.of(failed.id) == [received, started, "task-failed"]
        assert monitor.of(flaky.id) == [received, started, "task-retried", received, started, "task-succeeded"]
        assert monitor.of(rejected.id) == [received, started, "task-failed", "task-rejected"]
        assert monitor.of(late.id) == ["task-revoked"]  # as it never ran, it was not received either
        assert monitor.of(waiting.id) == ["task-revoked"]
        assert monitor.of(running.id) == [received, started, "task-revoked"]
        assert not monitor.last(received, name="shop.quiet")

        first = monitor.wait_for(received, uuid=done.id)
        assert {name: first[name] for name in ("name", "args", "kwargs", "retries", "root_id", "parent_id", "eta")} == {
            "name": "shop.add", "args": "(1, 1)", "kwargs": "{}", "retries": 0, "root_id": done.id, "parent_id": None, "eta": None,
        }  # fmt: skip
        assert datetime.fromisoformat(first["expires"]) > datetime.now(timezone.utc)
        success = monitor.wait_for("task-succeeded", uuid=done.id)
        assert success["result"] == "2"
        assert 0 <= success["runtime"] < 30
        failure = monitor.wait_for("task-failed", uuid=failed.id)
        assert failure["exception"] == "ValueError('no stock')"
        assert 'raise ValueError("no stock")' in failure["traceback"]
        assert "Retry" in monitor.wait_for("task-retried", uuid=flaky.id)["traceback"]
        killed = monitor.wait_for("task-revoked", uuid=running.id)
        assert (killed["terminated"], killed["signum"], killed["expired"]) == (True, signal.SIGKILL, False)
        assert monitor.wait_for("task-revoked", uuid=late.id)["expired"] is True

        # On and off.
        assert node("disable_events") == {"ok": "task events disabled"}
        silent = app.add.delay(4, 4)
        assert silent.get(timeout=30) == 8
        node("heartbeat")
        monitor.wait_for("worker-heartbeat", freq=5)
        assert monitor.of(silent.id) == []
        assert node("enable_events") == {"ok": "task events enabled"}
        monitor.wait_for("task-succeeded", uuid=app.add.delay(5, 5).id)

        process.send_signal(signal.SIGTERM)
        shop.ended(process)
        monitor.wait_for("worker-offline", 10)


SIGNALS = """
from celery import signals

app.conf.update(task_track_started=True)
PARENT = os.getpid()

def hear(name):
    def heard(sender=None, request=None, message=None, **told):
        task_id = request.id if request is not None else told.get("task_id") or told.get("id")
        task_id = task_id or message.headers.get("id") or message.payload["id"]
        if name in ("received", "rejected", "unknown"):
            assert sender.hostname and os.getpid() == PARENT
        note(f"{task_id}: {name} of {sender.app.main if hasattr(sender, 'app') else 'nobody'} {told.get('expired', '')}")
    getattr(signals, "task_" + name).connect(heard, weak=False)

for each in ("received", "rejected", "unknown", "prerun", "revoked", "failure"):
    hear(each)

@app.task(shared=False)
def fails():
    raise ValueError("no stock")
"""


RECEIVED = ("name", "args", "kwargs", "root_id", "parent_id", "retries", "eta", "expires")


def send_expired(app: Celery, queue: str) -> str:
    """Without the time to live that Celery sends with it: else a worker of Celery's would not get it at all."""
    task_id, past = uuid4().hex, datetime.now(timezone.utc) - timedelta(hours=1)
    message = app.amqp.create_task_message(task_id, "shop.add", (1, 1), {}, expires=past)
    with app.producer_pool.acquire(block=True) as producer:
        producer.publish(
            message.body, routing_key=queue, headers=message.headers, serializer="json", **message.properties
        )
    return task_id


@pytest.mark.parametrize("protocol", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_both_kinds_of_workers_tell_the_same(
    make_shop: MakeShop, queue: DBQueue, broker_url: str, protocol: int
) -> None:
    """Of the same messages: the same events and signals, in the same order, and the same answers while they run."""
    shop = make_shop(backend=broker_url, more=SIGNALS)
    app, names = shop.app.app, ("ours", "theirs")
    app.conf.task_protocol = protocol
    with monitored(shop) as monitor:
        other = shop.celery("worker", "-n", "w1@shop", "-c", "1", "-E", "-Q", "theirs", "-l", "INFO")
        start(shop, "-E", "-Q", "ours")
        wait_for(lambda: "w1@shop ready" in shop.log(other), 60, "the other worker did not become ready")
        revoked = {name: uuid4().hex for name in names}
        app.control.revoke(list(revoked.values()))
        for node in (NODE, "w1@shop"):
            wait_for(lambda: set(revoked.values()) <= set(Node(shop, node)("revoked")), 20)  # noqa: B023
        sent = {
            name: {
                "done": shop.app.add.apply_async((1, 1), queue=name).id,
                "failed": shop.app.fails.apply_async(queue=name).id,
                "expired": send_expired(app, name),
                "revoked": shop.app.add.apply_async((1, 1), queue=name, task_id=revoked[name]).id,
                "unknown": app.send_task("shop.nothing", queue=name).id,
                "invalid": app.send_task("shop.add", (1, 1), queue=name, headers={"eta": "no date"}).id,
                "last": shop.app.add.apply_async((2, 2), queue=name).id,
            }
            for name in names
        }
        for ids in sent.values():
            for task, end in (("last", "succeeded"), ("expired", "revoked"), ("revoked", "revoked")):
                monitor.wait_for(f"task-{end}", uuid=ids[task])
        for nth, (name, node) in enumerate((("ours", Node(shop)), ("theirs", Node(shop, "w1@shop")))):
            task_id = sent[name]["killed"] = shop.app.slow.apply_async(("long", 600), queue=name).id
            wait_for(lambda: shop.notes.count("start long") > nth, 30)  # noqa: B023
            (active,) = node("active")
            assert {field: active[field] for field in ("id", "name", "type", "args", "kwargs")} == {
                "id": task_id, "name": "shop.slow", "type": "shop.slow", "args": ["long", 600], "kwargs": {},
            }  # fmt: skip
            assert active["delivery_info"]["routing_key"] == name
            assert node("query_task", ids=[task_id])[task_id][0] == "active"
            assert node("reserved") == []
        app.control.terminate([ids["killed"] for ids in sent.values()], signal="SIGKILL")
        for ids in sent.values():
            end = monitor.wait_for("task-revoked", uuid=ids["killed"])
            assert (end["terminated"], end["expired"]) == (True, False)

    def told_of(task_id: str) -> tuple[list[str], list[str], str, dict[str, Any]]:
        """Its events, its signals, its state, and with what it was received."""
        signals = [note.split(": ")[1] for note in shop.notes if note.startswith(task_id)]
        received = monitor.last("task-received", uuid=task_id) or {}
        fields = {name: received[name] for name in RECEIVED if received and received[name] != task_id}
        return monitor.of(task_id), signals, app.AsyncResult(task_id).state, fields

    ours, theirs = ({task: told_of(task_id) for task, task_id in ids.items()} for ids in sent.values())
    assert ours["expired"] == (["task-revoked"], ["revoked of shop True"], "REVOKED", {})
    # What cannot run is kept, and may run after a deploy; and it is a child of ours that reads a message first.
    unknown, rejected = ["unknown of shop "], ["rejected of shop "]
    assert ours.pop("unknown") == ([], unknown, "PENDING", {})
    assert theirs.pop("unknown") == (["task-failed"], unknown, "FAILURE", {})
    assert ours.pop("invalid")[:3] == (["task-received", "task-started", "task-rejected"], rejected, "PENDING")
    assert theirs.pop("invalid")[:3] == ([], rejected, "PENDING")
    if protocol == 1:  # its sender wrote no texts of the arguments; Celery shows none
        for told, shown in ((ours, "[1, 1]"), (theirs, None)):
            assert told["done"][3].pop("args") == shown
            told.update({task: (*told[task][:3], {}) for task in told})
    assert ours == theirs


@pytest.mark.databases("postgres")
def test_a_log_in_trouble_costs_events_and_nothing_else(
    make_shop: MakeShop, queue: DBQueue, broker_url: str, database_url: str
) -> None:
    shop = make_shop(backend=broker_url)
    app = shop.app.app
    with app.connection_for_read() as connection:  # else nobody wants events, and none is written
        watch = kombu.Queue("watch", get_exchange(connection), "#", durable=False, auto_delete=True)
        watch(connection.default_channel).declare()
    process = start(shop, "-E")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE dbqueue_mail RENAME TO elsewhere")
        assert [shop.app.add.delay(n, 1).get(timeout=30) for n in range(10)] == list(range(1, 11))
        wait_for(lambda: "events cannot be sent" in shop.log(process), 30)
        connection.execute("ALTER TABLE elsewhere RENAME TO dbqueue_mail")
    with monitored(shop) as monitor:
        wait_for(lambda: "events are sent again" in shop.log(process), 30)
        assert shop.app.add.delay(20, 1).get(timeout=30) == 21
        monitor.wait_for("task-succeeded", result="21")
        assert Node(shop)("ping") == {"ok": "pong"}
    process.send_signal(signal.SIGTERM)
    shop.ended(process)


def test_events_are_of_celery_apps_only(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("from dbqueue import DBQueue\nqueue = DBQueue('sqlite:///jobs.db')\n")
    command = [sys.executable, "-m", "dbqueue", "worker", "-A", "jobs", "-E"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "-E sends Celery's events" in ended.stderr
