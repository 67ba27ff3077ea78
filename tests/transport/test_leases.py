"""Whose a message is: a killed consumer's comes back after the lease, a living one's never does, and no ack is forgotten (C4)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kombu
import kombu.common
import pytest

from dbqueue import DBQueue
from dbqueue.errors import ConnectionLost
from tests.servers import Server
from tests.waiting import wait_for

Connect = Callable[..., kombu.Connection]

pytestmark = pytest.mark.req("C4")

ROOT = Path(__file__).parents[2]


def declared(channel: Any) -> Any:
    queue = kombu.Queue("q", routing_key="q")(channel)
    queue.declare()
    return queue


def publish(channel: Any, *bodies: Any) -> None:
    for body in bodies:
        kombu.Producer(channel).publish(body, routing_key="q")


_CONSUMER = """
import sys, time, kombu, kombu.common
got = []
connection = kombu.Connection(sys.argv[1], transport_options={"lease": float(sys.argv[2])})
queue = kombu.Queue("q", routing_key="q")
with kombu.Consumer(connection, [queue], on_message=got.append, prefetch_count=1):
    while not got:
        connection.drain_events(timeout=30)
    print("has it", flush=True)
    if sys.argv[3] == "hold":
        time.sleep(float(sys.argv[4]))
        got[0].ack()
        connection.release()
        print("acked", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def consumer_process(broker_url: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _CONSUMER, broker_url, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_consumers_message_comes_back_after_the_lease(connect: Connect, broker_url: str) -> None:
    connection = connect(lease=2)
    queue = declared(connection.default_channel)
    publish(connection.default_channel, 1)
    got: list[Any] = []
    with consumer_process(broker_url, 2, "wait") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        with kombu.Consumer(connection, [queue], on_message=got.append):
            connection.drain_events(timeout=30)
    assert 0.5 < time.monotonic() - killed < 10
    assert got[0].delivery_info["redelivered"] is True


def test_a_living_consumer_keeps_its_message_while_its_thread_does_something_else(
    connect: Connect, broker_url: str, queue: DBQueue
) -> None:
    """Three leases long nobody drains, ticks or acks in that process."""
    connection = connect(lease=1)
    target = declared(connection.default_channel)
    publish(connection.default_channel, 1)
    with (
        consumer_process(broker_url, 1, "hold", 3.5) as process,
        kombu.Consumer(connection, [target], on_message=print),
    ):
        assert process.stdout is not None
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=3)
        assert process.stdout.readline() == "acked\n"
    assert queue.counts("q") == {"acked": 1}
    assert queue.jobs(queue="q")[0].lapses == 0


def test_an_ack_is_written_before_the_connection_is_closed(connect: Connect, queue: DBQueue) -> None:
    connection = connect()
    declared(connection.default_channel)
    publish(connection.default_channel, *range(20))
    got = [connection.default_channel.basic_get("q") for _ in range(20)]
    with locked_for_a_moment(queue):
        for message in got:
            message.ack()
        connection.release()
        assert queue.counts("q") == {"acked": 20}


@contextmanager
def locked_for_a_moment(queue: DBQueue) -> Iterator[None]:
    """All jobs are locked by somebody else, who goes away by himself while the block runs."""
    locked, gone = threading.Event(), threading.Event()

    def hold() -> None:
        with queue.database.transaction() as session:
            session.execute("UPDATE dbqueue_jobs SET updated_at = updated_at")
            locked.set()
            gone.wait(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(10)
    yield
    thread.join()


def test_an_ack_through_a_closed_channel_counts(
    connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Celery's running tasks do it after a reconnect: the worker says which have begun."""
    from dbqueue.kombu_transport import channel as channels

    monkeypatch.setattr(channels, "_running_tasks", lambda: {"begun"})
    connection = connect()
    channel = connection.channel()
    channel.feeds_celery = True
    declared(channel)
    for task in ("begun", "waiting"):
        kombu.Producer(channel).publish(1, routing_key="q", headers={"id": task, "task": "t"})
    begun, waiting = channel.basic_get("q"), channel.basic_get("q")
    channel.close()
    wait_for(lambda: queue.counts("q") == {"pending": 1, "running": 1}, 10)
    waiting.ack()  # too late: it may run elsewhere
    begun.ack()
    wait_for(lambda: queue.counts("q") == {"pending": 1, "acked": 1}, 10)
    assert queue.jobs(state="pending")[0].attempt == 0


forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # with threads, which is what is tried here


@forks
def test_a_forked_child_leaves_the_parents_messages_alone(connect: Connect, queue: DBQueue) -> None:
    connection = connect(lease=2)
    declared(connection.default_channel)
    publish(connection.default_channel, 1)
    message = connection.default_channel.basic_get("q")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            connection.collect()  # what kombu's pools do in a child
            with kombu.Connection(connection.as_uri(include_password=True)) as own:
                kombu.Producer(own.channel()).publish(2, routing_key="q")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert queue.counts("q") == {"running": 1, "pending": 1}
    message.ack()
    wait_for(lambda: queue.counts("q") == {"acked": 1, "pending": 1}, 10)


@forks
def test_a_connection_used_in_a_forked_child_says_so(connect: Connect) -> None:
    connection = connect()
    channel = connection.channel()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if not connection.connected:
                try:
                    kombu.Producer(channel).publish(1, routing_key="q")
                except ConnectionLost:
                    _publish_again(connection)
                    code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert channel.basic_get("q").payload == 2


def test_acks_and_claims_outlive_a_short_outage(postgres: Server, connect: Connect, queue: DBQueue) -> None:
    connection = connect(lease=60)
    target = declared(connection.default_channel)
    publish(connection.default_channel, 1)
    got: list[Any] = []
    with kombu.Consumer(connection, [target], on_message=got.append):
        connection.drain_events(timeout=10)
        assert queue.counts("q") == {"running": 1}
        postgres.stop()
        got[0].ack()
        postgres.start()
        wait_for(lambda: queue.counts("q") == {"acked": 1}, 30)
        _publish_again(connection)
        while len(got) < 2:
            connection.drain_events(timeout=30)
    assert [message.payload for message in got] == [1, 2]


def test_an_outage_longer_than_a_lease_is_told(postgres: Server, connect: Connect, queue: DBQueue) -> None:
    """Celery then drops what it has not begun, which may run elsewhere by now."""
    connection = connect(lease=1)
    target = declared(connection.default_channel)
    publish(connection.default_channel, 1)
    got: list[Any] = []
    with kombu.Consumer(connection, [target], on_message=got.append):
        connection.drain_events(timeout=10)
        postgres.stop()
        with pytest.raises(ConnectionLost):
            connection.drain_events(timeout=30)
        postgres.start()


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("claimed", ["before the look", "during the look"])
def test_a_reconnect_hands_back_nothing_that_is_being_fetched(
    connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch, claimed: str
) -> None:
    """The process's own thread looks for claims whose answer was lost, while another thread's has just come and is not noted yet: the
    message would go to two."""
    connection = connect()
    channel = connection.channel()
    declared(channel)
    publish(channel, 1, 2)
    held = channel.basic_get("q")  # so the thread has a session
    station, dialect = channel.station, channel.station.dialect
    wait_for(lambda: station._connection.session, 10)
    turn, release = dialect.turn, dialect.release_unknown
    looking, fetched, looked = threading.Event(), threading.Event(), threading.Event()

    def lose_the_connection() -> None:
        pid = station._connection.session.connection.info.backend_pid
        with queue.database.session() as session:
            session.execute(f"SELECT pg_terminate_backend({pid})")
        station.wake()

    def fetching(session: Any, request: Any) -> Any:
        result = turn(session, request)
        if threading.current_thread() is threading.main_thread():
            fetched.set()
            if claimed == "before the look" and not looked.is_set():
                lose_the_connection()
                assert looked.wait(30)
        return result

    def releasing(session: Any, worker: str, known: Any) -> int:
        looking.set()
        assert fetched.wait(30)
        count = release(session, worker, known)
        looked.set()
        return count

    monkeypatch.setattr(dialect, "turn", fetching)
    monkeypatch.setattr(dialect, "release_unknown", releasing)
    if claimed == "during the look":
        lose_the_connection()
        assert looking.wait(30)
    message = channel.basic_get("q")
    assert looked.is_set()
    assert queue.counts("q") == {"running": 2}
    assert connect(lease=50).channel().basic_get("q") is None
    for each in (held, message):
        each.ack()
    wait_for(lambda: queue.counts("q") == {"acked": 2}, 10)
    assert {record.attempt for record in queue.jobs(queue="q")} == {1}


def _publish_again(connection: kombu.Connection) -> None:
    """As Celery publishes: kombu's own retry policy."""
    producer = kombu.Producer(connection)
    publisher = connection.ensure(producer, producer.publish, max_retries=5, interval_start=0.1)
    publisher(2, routing_key="q")


def test_a_message_that_lost_too_many_leases_is_dead(connect: Connect, queue: DBQueue) -> None:
    from dbqueue.database.engine import Database
    from dbqueue.kombu_transport.station import MOST_LAPSES
    from tests.factory import set_columns

    channel = connect().channel()
    declared(channel)
    publish(channel, 1)
    database: Database = queue.database
    set_columns(database, queue.jobs(queue="q")[0].id.bytes, lapses=MOST_LAPSES)
    assert channel.basic_get("q") is None
    wait_for(lambda: queue.counts("q") == {"dead": 1}, 10)
    assert queue.jobs(state="dead")[0].error_kind == "crashed"


@pytest.mark.req("C3", "C4")
def test_a_crash_of_the_server_loses_letters_but_makes_nobody_deaf(
    postgres: Server, connect: Connect, queue: DBQueue
) -> None:
    """The log is not logged, as PostgreSQL calls it: it is empty after a crash, and its readers' cursors are gone."""
    connection, other = connect(), connect()
    brief = kombu.Queue("b", kombu.Exchange("e", type="fanout", durable=False), auto_delete=True, durable=False)
    target = brief(connection.default_channel)
    target.declare()
    got: list[Any] = []

    def publish_letter(body: Any) -> None:
        producer = kombu.Producer(other)
        other.ensure(producer, producer.publish, max_retries=10, interval_start=0.2)(
            body, exchange="e", delivery_mode=1
        )

    with kombu.Consumer(connection, [target], on_message=lambda m: got.append(m.payload), no_ack=True):
        for body in (1, 2):
            publish_letter(body)
            connection.drain_events(timeout=10)
        postgres.stop("immediate")
        postgres.start()
        queue_is_back(queue)
        for body in (3, 4):
            publish_letter(body)
        while len(got) < 4:
            connection.drain_events(timeout=10)
    assert got == [1, 2, 3, 4]


def queue_is_back(queue: DBQueue) -> None:
    def reached() -> bool:
        try:
            queue.counts()
        except ConnectionLost:
            return False
        return True

    wait_for(reached, 30)


@pytest.mark.databases("sqlite")
def test_a_long_write_transaction_takes_no_living_consumers_message(
    connect: Connect, broker_url: str, queue: DBQueue
) -> None:
    """Nobody can renew while it lasts, and the first to write after it may be another worker's sweep."""
    connection = connect(lease=0.5)
    declared(connection.default_channel)
    publish(connection.default_channel, 1)
    message = connection.default_channel.basic_get("q")
    dialect = queue.database.dialect
    with queue.database.transaction() as session:
        until = session.execute("SELECT lease_until FROM dbqueue_jobs")[0][0]
        wait_for(lambda: dialect.now(session) > until, 10)
        assert dialect._expire(session, dialect.now(session), 10) == (0, 0, 0)  # type: ignore[attr-defined]
    message.ack()
    wait_for(lambda: queue.counts("q") == {"acked": 1}, 10)


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("acked", ["meanwhile", "afterwards"])
def test_a_consumer_that_could_not_write_for_a_lease_goes_on(connect: Connect, queue: DBQueue, acked: str) -> None:
    """It is the first to write again, before any sweep: nobody has taken what it holds."""
    connection = connect(lease=0.5)
    declared(connection.default_channel)
    publish(connection.default_channel, 1)
    message = connection.default_channel.basic_get("q")
    dialect = queue.database.dialect
    with queue.database.transaction() as session:
        until = session.execute("SELECT lease_until FROM dbqueue_jobs")[0][0]
        if acked == "meanwhile":
            message.ack()
        wait_for(lambda: dialect.now(session) > until, 10)
    if acked == "afterwards":
        with queue.database.session() as session:
            wait_for(lambda: session.execute("SELECT lease_until FROM dbqueue_jobs")[0][0] > until, 10)
        message.ack()
    wait_for(lambda: queue.counts("q") == {"acked": 1}, 10)
    assert queue.jobs(queue="q")[0].lapses == 0
