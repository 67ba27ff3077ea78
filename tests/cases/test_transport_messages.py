"""Messages of a Celery app on dbqueue: what others lost, doubled or held back on their way, without a worker in between."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import kombu
import kombu.exceptions
import pytest
from celery import Celery

from dbqueue import DBQueue
from dbqueue.clock import SECOND
from dbqueue.database.tables import Letter
from dbqueue.errors import DatabaseError
from dbqueue.kombu_transport.housekeeping import Housekeeping
from dbqueue.mail import Mail
from tests.transport.conftest import app as app
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import connect as connect
from tests.transport.conftest import queue as queue
from tests.transport.test_leases import consumer_process
from tests.transport.test_messages import Connect, declared, drained, publish
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


@pytest.mark.req("C3")
def test_an_expiry_is_no_delay(app: Celery, connect: Connect, queue: DBQueue) -> None:
    """C07. Kombu on PostgreSQL: `expires` was taken for a delay, so that a task became visible at the instant of its end. Until then it
    is there like any other; afterwards it is not delivered, and its row says so."""
    connection = connect()
    channel, target = connection.default_channel, declared(connection.default_channel)
    app.send_task("a", expires=3_600)
    message = channel.basic_get("q")
    assert message.headers["task"] == "a"
    assert 3_500_000 < float(message.properties["expiration"]) <= 3_600_000
    message.ack()
    soon = app.send_task("b", expires=0.05)
    wait_for(lambda: channel.queue_declare("q", passive=True).message_count == 0)
    app.send_task("c")
    assert [m.headers["task"] for m in drained(connection, target, 1)] == ["c"]
    wait_for(lambda: queue.counts("q").get("cancelled") == 1)
    (record,) = queue.jobs(queue="q", state="cancelled")
    assert (record.task_id, record.error_kind) == (soon.id, "expired")


@pytest.mark.req("C3", "C4")
@pytest.mark.parametrize("how", ["requeue", "recover", "close", "lease"])
def test_what_comes_back_comes_to_its_own_queue_only(
    connect: Connect, queue: DBQueue, broker_url: str, how: str
) -> None:
    """C29. Kombu: what was not acknowledged was published to its exchange once more, and every queue bound there got a second copy. C133.
    The flag that says so was missing."""
    connection = connect(lease=1)
    channel = connection.channel()
    exchange = kombu.Exchange("c29", type="topic")
    for name in ("q", "other"):
        kombu.Queue(name, exchange, routing_key="#")(channel).declare()
    publish(channel, {"n": 1}, "x.y", "c29")
    if how == "lease":
        with consumer_process(broker_url, 1, "wait") as process:
            process.send_signal(signal.SIGKILL)
            process.wait()
    else:
        message = channel.basic_get("q")
        assert message.delivery_info["redelivered"] is False
        {"requeue": message.requeue, "recover": lambda: channel.basic_recover(requeue=True), "close": channel.close}[
            how
        ]()
    again = connect(lease=1)
    (back,) = drained(again, kombu.Queue("q", exchange, routing_key="#")(again.default_channel), 1)
    back.ack()
    assert (back.payload, back.delivery_info["redelivered"]) == ({"n": 1}, True)
    assert (back.delivery_info["exchange"], back.delivery_info["routing_key"]) == ("c29", "x.y")
    wait_for(lambda: queue.counts("q") == {"acked": 1})
    assert queue.counts("other") == {"pending": 1}


_CLIENT = """
import sys
from celery import Celery
app = Celery("shop", broker=sys.argv[1], set_as_current=False)
for n in range(3):
    assert app.control.ping(timeout=0.05) == []
print("pinged", flush=True)
sys.stdin.readline()
app.control.mailbox._collect = lambda *_, **__: [print("asked", flush=True), sys.stdin.readline()]
app.control.ping(timeout=60)
"""
_TABLES = ("queues", "bindings", "consumers", "mail", "cursors")


@pytest.mark.req("C3")
def test_clients_of_remote_control_leave_nothing_behind(queue: DBQueue, broker_url: str) -> None:
    """C10. Kombu: the reply queues of control clients that had gone grew without limit. C101. AiiDA, Galaxy: nor did anybody delete
    messages that were through with. Here a client deletes its queue, and for one that was killed any consumer does, by age."""
    log = Mail(queue.database)

    def left() -> dict[str, int]:
        found = {}
        for table in _TABLES:
            with log._session() if table in ("mail", "cursors") else queue.database.session() as session:
                found[table] = int(session.execute(f"SELECT count(*) FROM dbqueue_{table}")[0][0])
        return found

    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, broker_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "pinged\n"
        before = left()
        assert client.stdin is not None
        client.stdin.write("go on\n")
        client.stdin.flush()
        assert client.stdout.readline() == "asked\n"
        assert left()["queues"] == before["queues"] + 1
    finally:
        client.kill()
        client.communicate()
    assert before["queues"] == before["consumers"] == before["cursors"] == 0
    log.post(Letter("celeryev", "task.sent", b"{}", b"{}", 300 * SECOND, ()))
    queue.database.clock.offset = 600 * SECOND
    with queue.database.session() as session:
        Housekeeping(queue.database, log, "somebody")._sweep(session)
    log.close()
    assert left() == dict.fromkeys(_TABLES, 0)
    assert queue.counts() == {}


@pytest.mark.req("C3")
def test_priorities_out_of_range_take_the_nearest_place(connect: Connect) -> None:
    """C39. Celery: nobody could tell whether 0 or 9 goes first. C40. Celery on Redis: 50 became a level of its own above all others.
    Here it is 9, as with RabbitMQ, and what is no number is 0; whoever was first at its level is first."""
    connection = connect()
    channel, target = connection.default_channel, declared(connection.default_channel)
    given: list[Any] = [9, 50, 5, -3, "7", "high", None]
    for priority in given:
        channel.basic_publish(channel.prepare_message(str(priority), priority=priority), "", "q")
    got = drained(connection, target, len(given))
    assert [message.body.decode() for message in got] == ["9", "50", "7", "5", "-3", "high", "None"]


NAMES = [
    "a.b", "a-b", "a_b", "A_B", "a b", "x" * 200, "очередь", "q';--", 'q"x', "%", "%s", ":name", "{jobs}", "a/b", "\\",
    "celery@host.celery.pidbox",
]  # fmt: skip


@pytest.mark.req("C3")
def test_different_names_of_queues_and_exchanges_are_different(connect: Connect, queue: DBQueue) -> None:
    """C83. Kombu on PGMQ: names were made fit for SQL, so that several became one, and long ones broke it. Here a name is data."""
    connection, other = connect(), connect()
    channel = connection.default_channel
    targets = []
    for name in NAMES:
        targets.append(kombu.Queue(name, kombu.Exchange(f"e.{name}", type="direct"), routing_key=name)(channel))
        targets[-1].declare()
        publish(other.default_channel, name, name, f"e.{name}")
    assert [channel.queue_declare(name, passive=True).message_count for name in NAMES] == [1] * len(NAMES)
    got: list[Any] = []
    with kombu.Consumer(connection, targets, on_message=lambda m: (got.append(m.payload), m.ack())):
        for name in NAMES:
            publish(other.default_channel, name, name)  # to the default exchange, while it sleeps
        while len(got) < 2 * len(NAMES):
            connection.drain_events(timeout=10)
    assert sorted(got) == sorted(NAMES * 2)


@pytest.mark.req("C3")
def test_awkward_characters_arrive_or_are_refused_at_once(app: Celery, connect: Connect, queue: DBQueue) -> None:
    """C97. Awa, Kestra: a NUL or a lone surrogate in the arguments was an obscure error, or the message was lost. Arguments and headers may
    hold them; where a name would become a text of the database, publishing fails, and nothing is written."""
    connection = connect()
    target = declared(connection.default_channel)
    awkward = ["nul \x00", "lone \ud800", "\U0001f600", "\u2028\x7f"]
    app.send_task("a", (awkward,), {"key": awkward[0]}, headers={"mine": awkward[0]}, shadow="nul \x00")
    (message,) = drained(connection, target, 1)
    assert message.payload[:2] == [[awkward], {"key": awkward[0]}]
    assert message.headers["mine"] == awkward[0]
    message.ack()
    wait_for(lambda: queue.counts() == {"acked": 1})
    if queue.database.dialect.name == "postgresql":
        for options in ({"task_id": "i\x00"}, {"queue": "q\x00"}):
            with pytest.raises((DatabaseError, ValueError)):
                app.send_task("a", **options)
    assert queue.counts() == {"acked": 1}


@pytest.mark.req("C3")
@pytest.mark.parametrize("zone", ["UTC", "Europe/Amsterdam", "Asia/Tokyo", "America/St_Johns"])
def test_a_naive_eta_is_never_late(app: Celery, queue: DBQueue, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C122. Celery: naive times were read in another zone, and tasks expired at once or ran hours late. Only Celery's worker knows the zone
    of its app, so it is given such a task before it can be due anywhere. The zone of this process does not matter."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        app.conf.timezone = zone
        app.conf.broker_transport_options = {"eta_lead": 10}
        when = datetime(2999, 1, 1, 12, tzinfo=timezone.utc)
        app.send_task("aware", eta=when)
        app.send_task("naive", eta=when.astimezone(ZoneInfo(zone)).replace(tzinfo=None))
    finally:
        monkeypatch.undo()
        time.tzset()
    found = {record.target.rpartition(".")[2]: record.run_at for record in queue.jobs(queue="q")}
    assert found["aware"] == when - timedelta(seconds=10)
    assert found["aware"] - timedelta(hours=26) <= found["naive"] <= found["aware"]
