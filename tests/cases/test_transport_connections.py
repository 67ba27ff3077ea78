"""Celery's publishers and consumers whose database goes away, hides behind a pooler, or has no connection left."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from typing import Any

import kombu
import kombu.exceptions
import pytest
from celery import Celery

from dbqueue import DBQueue
from tests.bouncer import bounced
from tests.factory import now
from tests.servers import Server
from tests.transport.conftest import app as app
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import connect as connect
from tests.transport.conftest import queue as queue
from tests.transport.test_leases import consumer_process, queue_is_back
from tests.transport.test_messages import Connect, declared, drained, nothing_comes, publish
from tests.waiting import wait_for

POSTGRES = pytest.mark.databases("postgres")
BLINK = 5.0
"""Seconds in which a publisher must have said that it cannot."""


@pytest.mark.req("C4")
def test_a_lease_lasts_as_long_as_its_own_consumer_said(connect: Connect, queue: DBQueue) -> None:
    """C04. Celery on Redis: a process with a shorter visibility timeout took messages back from one that had a longer one. Here another's
    option does not count, and nobody else's renewal is needed: the row says until when."""
    mine, others = connect(lease=60), connect(lease=0.1, poll=0.05)
    target = declared(mine.default_channel)
    publish(mine.default_channel, 1)
    began = now(queue.database)
    (message,) = drained(mine, target, 1)
    (record,) = queue.jobs(queue="q")
    assert record.lease_until is not None
    assert record.lease_until.timestamp() * 1e6 > began + 50_000_000
    with nothing_comes(others, kombu.Queue("q", routing_key="q")(others.default_channel), 1.5):
        pass
    message.ack()
    wait_for(lambda: queue.counts("q") == {"acked": 1})


@POSTGRES
@pytest.mark.req("C4")
def test_a_consumer_that_was_suspended_confirms_nothing(connect: Connect, queue: DBQueue, broker_url: str) -> None:
    """C22. Solid Queue: a worker whose heartbeat lagged was given up while it finished, and the job ended twice. (On SQLite a process
    that is suspended still counts as living, by its lock, and keeps its message.)"""
    connection = connect(lease=1)
    target = declared(connection.default_channel)
    publish(connection.default_channel, 1)
    with consumer_process(broker_url, 1, "hold", 0.5) as process:
        process.send_signal(signal.SIGSTOP)
        (message,) = drained(connection, target, 1)
        assert message.delivery_info["redelivered"] is True
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.readline() == "acked\n"
        assert queue.counts("q") == {"running": 1}, "its ack changed nothing"
        message.ack()
        wait_for(lambda: queue.counts("q") == {"acked": 1})
    assert [(record.attempt, record.lapses) for record in queue.jobs(queue="q")] == [(2, 1)]


@POSTGRES
@pytest.mark.req("C1")
def test_publishing_fails_at_once_each_time_and_works_when_the_server_is_back(
    app: Celery, postgres: Server, queue: DBQueue
) -> None:
    """C37. Celery: `delay()` blocked for ever while the broker was down. C38. The first one failed as it should, and the second hung."""
    app.send_task("before")
    postgres.stop()
    policies: list[dict[str, Any]] = [{"retry": False}] * 3
    policies.append({"retry": True, "retry_policy": {"max_retries": 2, "interval_start": 0, "interval_step": 0.05}})
    for policy in policies:
        began = time.monotonic()
        with pytest.raises(kombu.exceptions.OperationalError):
            app.send_task("meanwhile", **policy)
        assert time.monotonic() - began < BLINK
    postgres.start()
    sent = app.send_task("after")
    queue_is_back(queue)
    assert len(queue.jobs(queue="q")) == 2
    assert sent.id in {record.task_id for record in queue.jobs(queue="q")}


@POSTGRES
@pytest.mark.req("C4")
def test_consuming_goes_on_after_cut_upon_cut(
    connect: Connect, queue: DBQueue, postgres: Server, broker_url: str
) -> None:
    """C31. Celery: after some lost connections in a row the worker said that it was back, and consumed nothing."""
    connection, other = connect(poll=0.05), connect()
    target = declared(connection.default_channel)
    database = str(queue.database.url.database)
    got: list[int] = []

    def take(message: Any) -> None:
        got.append(message.payload)
        message.ack()

    with kombu.Consumer(connection, [target], on_message=take, prefetch_count=2):
        for number in range(3):
            if number:
                for _ in range(3):  # each as soon as there is a session again
                    wait_for(lambda: postgres.terminate_connections(database), 20)
            producer = kombu.Producer(other)
            other.ensure(producer, producer.publish, max_retries=20, interval_start=0.05)(number, routing_key="q")
            while len(got) <= number:
                connection.drain_events(timeout=10)
    assert got == [0, 1, 2]
    queue_is_back(queue)
    wait_for(lambda: queue.counts("q") == {"acked": 3})


@POSTGRES
@pytest.mark.req("C1", "D18")
def test_messages_through_a_small_transaction_pooler(connect: Connect, queue: DBQueue, postgres: Server) -> None:
    """C110. pq, psycopg: prepared statements exist already or not any more behind PgBouncer, and broken transactions stay in its pool.
    C112. good_job: claims were session locks, which are lost or never freed there. Messages, letters, remote control."""
    url = queue.database.url.render_as_string(hide_password=False)
    with bounced(url, "transaction", "default_pool_size = 3") as through:
        through = f"dbqueue+{through}?pgbouncer=true&notify=false&poll=0.05"
        connections = [kombu.Connection(through) for _ in range(2)]
        letters = kombu.Queue(
            "news", kombu.Exchange("news", type="fanout", durable=False), durable=False, auto_delete=True
        )
        targets = [kombu.Queue("q", routing_key="q"), letters]
        got: list[Any] = []
        with kombu.Consumer(connections[0], targets, on_message=lambda m: (got.append(m.payload), m.ack())):
            threads = [threading.Thread(target=_publish_both, args=(connections[1].clone(), n)) for n in range(4)]
            for thread in threads:
                thread.start()
            while len(got) < 80:
                connections[0].drain_events(timeout=10)
            for thread in threads:
                thread.join()
        assert Counter(got) == Counter([*range(40), *(f"letter {n}" for n in range(40))])
        wait_for(lambda: queue.counts("q") == {"acked": 40})
        name = queue.database.url.database
        sessions = "SELECT count(*), count(*) FILTER (WHERE state LIKE 'idle in transaction%%') FROM pg_stat_activity"
        through_it = " WHERE datname = %s AND application_name LIKE 'dbqueue%%'"
        found = postgres.execute(sessions + through_it, (name,))[0]
        assert found[0] <= 3 + 1, "three of the pooler's, one of this test's own queue"
        assert found[1] == 0
        for connection in connections:
            connection.release()
    held = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE locktype = 'advisory' AND datname = %s"
    assert postgres.execute(held, (name,)) == [(0,)]


def _publish_both(connection: kombu.Connection, number: int) -> None:
    with connection:
        for n in range(10 * number, 10 * number + 10):
            kombu.Producer(connection).publish(n, routing_key="q")
            kombu.Producer(connection).publish(f"letter {n}", exchange="news", delivery_mode=1)


@POSTGRES
@pytest.mark.req("C1", "D18")
def test_publishing_threads_share_few_sessions(app: Celery, postgres: Server, queue: DBQueue) -> None:
    """C113. Celery with a database: workers times pools exceed max_connections. A process has as many sessions as its pool allows, however
    many threads publish, and beside them one that works and one that listens."""
    start = threading.Barrier(30)
    errors: list[BaseException] = []

    def send() -> None:
        start.wait()
        try:
            for _ in range(5):
                app.send_task("a")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=send) for _ in range(30)]
    most, name = 0, queue.database.url.database
    question = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name LIKE 'dbqueue%%'"
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, postgres.execute(question, (name,))[0][0])
    assert errors == []
    assert queue.counts("q") == {"pending": 150}
    assert most <= queue.settings.workers + 1 + 2
