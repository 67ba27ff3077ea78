"""Many who publish, consume, purge and clear up at the same time, through the transport."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import kombu
import pytest

from dbqueue import DBQueue
from dbqueue.clock import SECOND
from dbqueue.database.tables import Letter
from dbqueue.kombu_transport.housekeeping import Housekeeping
from dbqueue.mail import Mail
from tests.servers import Server
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import connect as connect
from tests.transport.conftest import queue as queue
from tests.transport.test_messages import Connect
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
HELD = 0.6


class Crowd:
    """Threads that do something again and again; the first error of any ends the test."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def again_and_again(self, call: Callable[[], object]) -> None:
        self._start(lambda: [call() for _ in iter(self.stop.is_set, True)])

    def once(self, call: Callable[[], object]) -> threading.Thread:
        return self._start(call)

    def _start(self, call: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return self.threads[-1]


@contextmanager
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    try:
        yield made
    finally:
        made.stop.set()
        for thread in made.threads:
            thread.join()
    assert made.errors == []


def consuming(connection: kombu.Connection, names: tuple[str, ...], got: list[Any], stop: threading.Event) -> None:
    def take(message: Any) -> None:
        got.append(message.payload)
        message.ack()

    queues = [kombu.Queue(name, routing_key=name) for name in names]
    with connection, kombu.Consumer(connection, queues, on_message=take, prefetch_count=8):
        while not stop.is_set():
            try:
                connection.drain_events(timeout=0.1)
            except TimeoutError:
                continue


@pytest.mark.databases("postgres")
@pytest.mark.req("D11", "C4")
def test_consumers_purges_and_sweeps_do_not_deadlock(connect: Connect, queue: DBQueue, postgres: Server) -> None:
    """C105. River, Kombu on SQL: maintenance and claims locked rows in different orders, and deadlocked. Here are publishers of messages
    that are due, that wait, that expire and that are put back, consumers, purges, letters, queues that come and go, and sweeps."""
    name, total = str(queue.database.url.database), 120
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = %s"
    got: list[Any] = []

    def publish(first: int) -> None:
        with connect().clone() as connection:
            producer = kombu.Producer(connection)
            for n in range(first, first + total):
                producer.publish(n, routing_key="q", priority=n % 10)
                producer.publish(n, routing_key="purged", headers={"eta": "2999-01-01T00:00:00+00:00"} if n % 2 else {})
                producer.publish(n, routing_key="purged", expiration=0.001)

    def come_and_go() -> None:
        with connect().clone() as connection:
            brief = kombu.Queue("", kombu.Exchange("x", type="fanout", durable=False), durable=False, auto_delete=True)
            with kombu.Consumer(connection, [brief], on_message=print, no_ack=True):
                kombu.Producer(connection).publish(1, exchange="x", delivery_mode=1)

    def sweep() -> None:
        log = Mail(queue.database)
        with queue.database.session() as session:
            Housekeeping(queue.database, log, "w")._sweep(session)
        log.post(Letter("x", "", b"{}", b"1", SECOND // 1_000, ()))
        log.close()

    with crowd() as many:
        for _ in range(2):
            consumer = connect().clone()
            many.once(lambda consumer=consumer: consuming(consumer, ("q",), got, many.stop))  # type: ignore[misc]
            many.again_and_again(lambda: connect().default_channel.queue_purge("purged"))
            many.again_and_again(come_and_go)
            many.again_and_again(sweep)
        publishers = [many.once(lambda first=first: publish(first)) for first in range(0, 3 * total, total)]  # type: ignore[misc]
        for publisher in publishers:
            publisher.join()
        wait_for(lambda: len(got) >= 3 * total or many.errors, 30)
    assert sorted(got) == list(range(3 * total))
    assert postgres.execute(deadlocks, (name,)) == [(0,)]


_PUBLISH = """
import sys, kombu
with kombu.Connection(sys.argv[1]) as connection:
    for n in range(int(sys.argv[2]), int(sys.argv[3])):
        kombu.Producer(connection).publish(n, routing_key="q")
"""


@pytest.mark.databases("sqlite")
@pytest.mark.req("D11", "C1")
def test_publishers_and_consumers_share_a_file(connect: Connect, queue: DBQueue, broker_url: str) -> None:
    """C115. Solid Queue, Django-Q: "database is locked" when enqueueing, claiming and settling. Two processes publish and two connections
    consume as fast as they can, and for a while a transaction of the application's keeps them all out."""
    got: list[Any] = []
    commands = [[sys.executable, "-c", _PUBLISH, broker_url, str(first), str(first + 60)] for first in (0, 60)]
    with crowd() as many:
        for _ in range(2):
            consumer = connect().clone()
            many.once(lambda consumer=consumer: consuming(consumer, ("q",), got, many.stop))  # type: ignore[misc]
        publishers = [
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        wait_for(lambda: got or many.errors, 30)
        with closing(sqlite3.connect(str(queue.database.url.database), timeout=10, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            threading.Event().wait(HELD)
            holder.execute("COMMIT")
        told = [(publisher.communicate(timeout=60)[0], publisher.returncode) for publisher in publishers]
        assert told == [("", 0)] * 2
        wait_for(lambda: queue.counts("q") == {"acked": 120} or many.errors, 30)
    assert Counter(got) == Counter(range(120))
