"""What a process costs the server: how many sessions, for how long, and that a pooler may stand in between (C1).

Whose session it is, is told by ``application_name`` in its URL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from threading import Barrier, Thread
from urllib.parse import quote

import celery
import kombu
import psycopg
import pytest

from dbqueue import ConnectionLost, DBQueue
from dbqueue.database.engine import Database
from dbqueue.runtime import idle
from tests.bouncer import bounced
from tests.servers import Server
from tests.transport.shops import Shop, need_package
from tests.waiting import wait_for

pytestmark = [pytest.mark.databases("postgres"), pytest.mark.timeout(180)]

MakeShop = Callable[..., Shop]
MakeSessions = Callable[[str], int]


@pytest.fixture
def broker_url(database_url: str) -> str:
    """The workers'; the tests' own is ``ours``."""
    return f"dbqueue+{database_url}?application_name=worker"


@pytest.fixture
def ours(broker_url: str) -> str:
    return broker_url.replace("=worker", "=test")


@pytest.fixture
def sessions(postgres: Server, queue: DBQueue) -> MakeSessions:
    name = queue.database.url.database

    def count(application: str) -> int:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = %s"
        return int(postgres.execute(asked, (name, application))[0][0])

    return count


POOLS = [
    "prefork",
    *(pytest.param(pool, marks=pytest.mark.soak) for pool in ("solo", "threads", "gevent")),
]


@pytest.mark.req("C1")
@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_with_all_its_children_holds_three(
    make_shop: MakeShop, queue: DBQueue, ours: str, sessions: MakeSessions, pool: str
) -> None:
    """One that works, one that listens, one that publishes events and replies."""
    if pool == "gevent":
        need_package("gevent")
    shop = make_shop()
    app = celery.Celery(broker=ours, set_as_current=False)
    seen: list[int] = []

    def counted(fact: Callable[[], bool]) -> Callable[[], bool]:
        def look() -> bool:
            seen.append(sessions("worker"))
            return fact()

        return look

    try:
        process = shop.celery("worker", "-n", "w@shop", "-P", pool, "-c", "3", "-E", "-l", "INFO")
        wait_for(counted(lambda: "w@shop ready" in shop.logs[0].read_text()), 60, "the worker did not become ready")
        for n in range(60):
            app.send_task("shop.add", (n, 1), queue="shop")
        wait_for(counted(lambda: queue.counts("shop") == {"acked": 60}), 60, "not all were acked")
        assert app.control.ping(timeout=3, limit=1) == [{"w@shop": {"ok": "pong"}}]
        patience = 3 * idle.LOOK_EVERY if pool == "gevent" else 10
        wait_for(counted(lambda: sessions("worker") == 3), patience, "it listens, works and publishes")
        assert max(seen) <= (7 if pool == "gevent" else 3)  # each of its tasks sends its own events
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
        assert sessions("worker") == 0
    finally:
        app.close()


@pytest.mark.req("C1")
@pytest.mark.soak
def test_children_have_one_for_as_long_as_they_publish(
    make_shop: MakeShop, queue: DBQueue, ours: str, sessions: MakeSessions
) -> None:
    shop = make_shop()
    shop.worker(size=2)
    app = celery.Celery(broker=ours, set_as_current=False)
    try:
        for name in range(10):
            app.send_task("shop.fan", (name,), queue="shop")
        wait_for(lambda: queue.counts("shop") == {"acked": 40}, 60, "not all were acked")
        assert 4 <= sessions("worker") <= 5
        wait_for(lambda: sessions("worker") == 3, 4 * idle.LOOK_EVERY, "the children kept theirs")
        app.send_task("shop.fan", ("again",), queue="shop")
        wait_for(lambda: queue.counts("shop") == {"acked": 44}, 60, "they could not publish any more")
    finally:
        app.close()


@pytest.mark.req("C1")
def test_publishing_threads_share_sessions_that_are_closed_when_idle(
    ours: str, sessions: MakeSessions, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "LOOK_EVERY", 0.3)
    threads, start = 8, Barrier(8)
    with kombu.Connection(ours) as connection:

        def publish() -> None:
            producer = kombu.Producer(connection.channel())
            start.wait(30)
            for n in range(20):
                producer.publish({"n": n}, routing_key="q")

        running = [Thread(target=publish) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        assert queue.counts("q") == {"pending": 20 * threads}
        assert 1 <= sessions("test") <= 5
        wait_for(lambda: sessions("test") == 0, message="they stayed")
        producer = kombu.Producer(connection)
        for n in range(20):
            producer.publish({"n": n}, routing_key="q")
        assert sessions("test") == 1
        wait_for(lambda: sessions("test") == 0, message="the next one stayed")
    assert queue.counts("q") == {"pending": 20 * threads + 20}


@pytest.mark.req("C1")
def test_one_that_comes_back_to_a_pool_that_was_given_up_is_closed(ours: str, sessions: MakeSessions) -> None:
    """One lost connection gives up the pool while another thread still works on a connection of it."""
    with closing(Database(ours)) as database, database.session() as kept:
        given_up = database._pool
        with pytest.raises(ConnectionLost), database.session() as lost:
            lost.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        assert database._pool is not given_up
        assert kept.execute("SELECT 1") == [(1,)]
        assert sessions("test") == 1
    wait_for(lambda: sessions("test") == 0, message="it stayed")
    assert given_up is not None  # held until here: the interpreter would close what it frees


@pytest.mark.req("C1")
def test_who_only_publishes_has_one(ours: str, sessions: MakeSessions) -> None:
    """Also after its channel was closed: nothing is to be settled, so nobody needs a session for that."""
    with kombu.Connection(ours) as connection:
        for _ in range(3):
            with connection.channel() as channel:
                kombu.Producer(channel).publish({}, routing_key="q")
            assert channel.station._thread is None
        assert sessions("test") == 1


@pytest.mark.req("C1")
def test_who_consumes_no_more_keeps_none_for_it(ours: str, sessions: MakeSessions, queue: DBQueue) -> None:
    """A web server that asks its workers something now and then; what it does next works as before."""
    got: list[object] = []
    with kombu.Connection(ours) as connection:
        for n in range(2):
            kombu.Producer(connection).publish({"n": n}, routing_key="q", declare=[kombu.Queue("q")])
            with kombu.Consumer(connection, [kombu.Queue("q")], on_message=lambda m: (got.append(m.payload), m.ack())):
                connection.drain_events(timeout=10)
                wait_for(lambda: sessions("test") == 3, message="it does not listen")
            wait_for(lambda: sessions("test") == 1, message="it kept what it had for consuming")
    assert got == [{"n": 0}, {"n": 1}]
    assert queue.counts("q") == {"acked": 2}


@pytest.mark.req("C1", "C3")
def test_through_a_pooler_in_transaction_mode(
    make_shop: MakeShop, queue: DBQueue, database_url: str, postgres: Server
) -> None:
    """Publishers, one worker that polls, and one that listens beside the pooler. A session of the server goes from hand to hand: what is
    prepared, set or locked in it would be found by somebody else."""
    with ExitStack() as stack:
        inner = stack.enter_context(bounced(database_url, "transaction", "default_pool_size = 4"))
        url = f"dbqueue+{inner}?pgbouncer=true&notify=false"
        listening = f"dbqueue+{inner}?pgbouncer=true&listen_url={quote(database_url, safe='')}"
        shop = make_shop(broker_url=url)
        shop.worker("-E")
        shop.celery("-b", listening, "worker", "-n", "ears@shop", "-c", "2", "-l", "INFO", "-Q", "ears")
        wait_for(lambda: "ears@shop ready" in shop.logs[1].read_text(), 60, "the worker that listens is not ready")
        app = celery.Celery(broker=listening, set_as_current=False)
        stack.callback(app.close)
        for n in range(40):
            app.send_task("shop.add", (n, 9), queue=("shop", "ears")[n % 2])
        for name in range(5):
            app.send_task("shop.fan", (name,), queue="shop")
        app.send_task("shop.flaky", ("x",), queue="shop")
        wait_for(lambda: set(queue.counts()) == {"acked"} and "try x 1" in shop.notes, 60, "not all were done")
        assert len(shop.notes) == len(set(shop.notes)) == 40 + 15 + 2
        names = ["ears@shop", "w0@shop"]
        assert sorted(name for answer in app.control.ping(timeout=5) for name in answer) == names
        assert sorted(app.control.inspect(timeout=5).stats() or {}) == names
        app.control.shutdown()
        assert [worker.wait(60) for worker in shop.workers] == [0, 0]
        assert not [log for log in shop.logs if "ERROR" in log.read_text() or "Traceback" in log.read_text()]
        with ExitStack() as held:  # every session that the pooler has
            for _ in range(4):
                connection = held.enter_context(psycopg.connect(inner, prepare_threshold=None))
                assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
                assert connection.execute("SHOW plan_cache_mode").fetchone() == ("auto",)
                assert connection.execute("SELECT count(*) FROM pg_listening_channels()").fetchone() == (0,)
        held_locks = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        assert postgres.execute(
            f"{held_locks} WHERE locktype = 'advisory' AND d.datname = %s", (queue.database.url.database,)
        ) == [(0,)]
