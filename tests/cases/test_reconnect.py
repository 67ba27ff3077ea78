"""Connections that are cut, refused, hushed or led to the wrong server: nobody hangs, and work goes on by itself."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
import pytest

from dbqueue import ConnectionLost, DBQueue, current_job, events
from dbqueue.database import wakeup
from dbqueue.database.dialect import OwnSession
from dbqueue.database.tables import Turn, TurnResult
from dbqueue.runtime import connection
from tests.cases.silent import SilentProxy
from tests.runtimes.jobs import Jobs, Nap, notes
from tests.runtimes.lab import Process, Told, in_thread, record, wait_all, wait_state
from tests.servers import Server
from tests.waiting import wait_for

pytestmark = pytest.mark.databases("postgres")

MakeQueue = Callable[..., DBQueue]


@dataclass(frozen=True)
class Number:
    n: int


@pytest.fixture
def silent(database_url: str) -> Iterator[SilentProxy]:
    proxy = SilentProxy(database_url)
    yield proxy
    proxy.close()


def database_of(queue: DBQueue) -> str:
    return str(queue.database.url.database)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D13")
def test_cut_again_and_again_within_seconds(jobs: Jobs, start: Callable[..., Process], postgres: Server) -> None:
    """C31. Celery: after some cuts in a row the worker says that it reconnected, and consumes nothing more."""
    worker = start("-c", 4, "--lease", 60).started()
    refs = []
    for _ in range(6):  # the producer's connection is cut, too
        postgres.terminate_connections(database_of(jobs.queue))
        refs += [jobs.quick.enqueue(Nap(0.02)).id for _ in range(3)]
    for ref in refs:
        assert wait_state(jobs.queue, ref, "succeeded").attempt == 1
    assert Counter(line.job for line in notes(jobs.folder, "start")) == Counter(map(str, refs))
    assert worker.popen.poll() is None


@pytest.mark.req("D13")
def test_failed_statements_leave_no_broken_transaction_behind(
    make_queue: MakeQueue, told: Told, postgres: Server
) -> None:
    """C32. kombu's SQLAlchemy transport: a statement failed, and every later one was told to roll back first."""
    queue = make_queue(poll=0.05)
    ran: list[int] = []
    go = threading.Event()

    @queue.job(max_attempts=1, timeout=20)
    def job(number: Number) -> None:
        ran.append(number.n)
        go.wait(15)

    with in_thread(queue, slots=1) as running, psycopg.connect(postgres.dsn(database_of(queue))) as holder:
        told.wait(events.WorkerStarted)
        waiting = f"""
            SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity
            WHERE datname = '{database_of(queue)}' AND wait_event_type = 'Lock'
        """

        for n in range(2):  # an operator cancels what the worker waits for: here it wants to settle
            go.clear()
            ref = job.enqueue(Number(n)).id
            wait_for(lambda: len(ran) == n + 1)  # noqa: B023
            holder.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
            go.set()
            wait_for(lambda: postgres.execute(waiting)[0][0])
            holder.rollback()
            assert wait_state(queue, ref, "succeeded").attempt == 1
            wait_for(lambda: not running.worker._held_up)
        # A role with a timeout that is too short: every statement that has to wait fails, on new connections as well.
        postgres.execute(f"ALTER DATABASE {database_of(queue)} SET statement_timeout = '40ms'")
        holder.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
        running.cut()
        wait_for(lambda: running.worker.connection._tries >= 3)
        holder.rollback()
        postgres.execute(f"ALTER DATABASE {database_of(queue)} RESET statement_timeout")
        wait_state(queue, job.enqueue(Number(2)).id, "succeeded")
    assert ran == [0, 1, 2]


@pytest.mark.req("D13", "D14")
def test_an_outcome_outlives_statements_that_are_cancelled(
    make_queue: MakeQueue, told: Told, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C32, where it happens more than once: somebody holds the table (an ALTER TABLE, a VACUUM FULL), and the role has a
    statement_timeout. That says nothing about the job, which did its work."""
    queue = make_queue(poll=0.05)
    go = threading.Event()
    turn, failed = queue.database.dialect.turn, list[BaseException]()

    @queue.job(max_attempts=1, timeout=20)
    def job() -> None:
        go.wait(15)

    def watched(session: OwnSession, asked: Turn) -> TurnResult:
        try:
            return turn(session, asked)
        except Exception as error:
            failed.extend([error] * bool(asked.settlements))
            raise

    monkeypatch.setattr(queue.database.dialect, "turn", watched)
    postgres.execute(f"ALTER DATABASE {database_of(queue)} SET statement_timeout = '50ms'")
    with in_thread(queue, slots=1), psycopg.connect(postgres.dsn(database_of(queue))) as holder:
        ref = job.enqueue().id
        told.wait(events.JobStarted)
        holder.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
        go.set()
        wait_for(lambda: len(failed) >= 4 or told.of(events.ClaimLost))
        holder.rollback()
        assert not told.of(events.ClaimLost)
        assert wait_state(queue, ref, "succeeded").attempt == 1


@pytest.mark.req("D13")
@pytest.mark.parametrize("slots", [1, 2])
def test_a_listening_connection_that_fell_silent_delays_by_a_poll_at_most(
    make_queue: MakeQueue, silent: SilentProxy, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C34. pg-boss: the listener's connection is half open, no error is raised, and wake-ups never come. With one slot the worker
    has to speak on it: that it is busy now. Then it notices, and makes another one."""
    monkeypatch.setattr(wakeup, "PATIENCE", 0.3)
    queue = make_queue(poll=0.5, listen_url=silent.url)
    starts: list[float] = []

    @queue.job(max_attempts=1, timeout=20)
    def job() -> None:
        starts.append(time.monotonic())

    with in_thread(queue, slots=slots) as running:
        running.asleep()
        listener = running.worker.connection.sleeper
        silent.hush()
        for n in range(3):
            began = time.monotonic()
            job.enqueue()
            wait_for(lambda: len(starts) == n + 1)  # noqa: B023
            assert starts[-1] - began < 0.5 + 1.0
            wait_all(queue, lambda counts: counts == {"succeeded": n + 1})  # noqa: B023
        if slots == 1:
            wait_for(lambda: running.worker.connection.sleeper not in (None, listener))
            assert silent.forwarded == 2


@pytest.mark.req("D13", "D14")
def test_a_database_that_fell_silent_does_not_stop_the_loop(
    silent: SilentProxy, queue: DBQueue, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C34, for the worker's own connection: it is given up while what is held can still be renewed on another one."""
    monkeypatch.setattr(connection, "SHORTEST_PATIENCE", 0.5)
    through = DBQueue(silent.url, poll=0.1, notify=False)
    go = threading.Event()
    cancelled: list[bool] = []

    @through.job(max_attempts=2, timeout=20)
    def job() -> None:
        running = current_job()
        assert running is not None
        go.wait(10)
        cancelled.append(running.cancelled)

    try:
        with in_thread(through, slots=1, lease=3):
            ref = job.enqueue()
            told.wait(events.JobStarted)
            silent.hush()
            told.wait(events.DatabaseTrouble)
            told.wait(events.DatabaseBack)
            go.set()
            assert wait_state(queue, ref.id, "succeeded").attempt == 1
            silent.cut()
    finally:
        through.close()
    assert cancelled == [False]


@pytest.mark.req("D13")
@pytest.mark.timeout(60)
def test_a_failover_to_a_server_that_may_only_be_read(make_server: Callable[..., Server], told: Told) -> None:
    """C35. Laravel, Graphile Worker: after a failover the worker repeated a claim for ever that a read-only server refused. Here the
    server comes back as a standby, and is promoted later; a job runs through all of it."""
    server = make_server(18)
    queue = DBQueue(server.dsn(server.create_database()), poll=0.1)
    go = threading.Event()

    @queue.job(max_attempts=3, timeout=50)
    def job(number: Number) -> None:
        if number.n == 0:
            go.wait(40)

    through = job.enqueue(Number(0)).id
    with in_thread(queue, slots=2):
        told.wait(events.JobStarted)
        later = job.enqueue(Number(1), delay=0.2).id
        server.stop()
        (server.home / "data" / "standby.signal").touch()
        server._process = server._spawn()  # `start` waits for a server that can be written to
        wait_for(lambda: standby(server), 30, "no standby came up")
        trouble = told.wait(events.DatabaseTrouble)
        go.set()
        with pytest.raises(ConnectionLost):
            job.enqueue(Number(2))
        assert len(trouble) == 1, "told once"
        server.execute("SELECT pg_promote()")
        told.wait(events.DatabaseBack)
        for ref in (through, later, job.enqueue(Number(3)).id):
            assert wait_state(queue, ref, "succeeded").attempt == 1
    assert record(queue, through).lapses == 0
    queue.close()


def standby(server: Server) -> bool:
    try:
        return bool(server.execute("SELECT pg_is_in_recovery()")[0][0])
    except psycopg.OperationalError:
        return False


# -- producers ---------------------------------------------------------------------------------------------------------


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@pytest.mark.req("D4")
def test_enqueueing_fails_at_once_while_the_server_is_down_and_works_when_it_is_back(
    queue: DBQueue, postgres: Server
) -> None:
    """C37, C38. Celery: `delay()` blocks for ever while the broker is down, the second call at the latest."""

    @queue.job(max_attempts=1, timeout=20)
    def job(number: Number) -> None: ...

    job.enqueue(Number(0))
    postgres.stop()
    for n in range(1, 5):
        with at_most(2), pytest.raises(ConnectionLost):
            job.enqueue(Number(n))
    postgres.start()
    assert record(queue, job.enqueue(Number(5)).id).state == "pending"
    assert queue.counts()["pending"] == 2


@pytest.mark.req("D4")
def test_enqueueing_waits_for_a_server_that_does_not_answer_once(queue: DBQueue, database_url: str) -> None:
    """C37, where the port takes connections and says nothing. The pooled connection is lost first, so there are several places
    that could each wait anew."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port, where = mute.getsockname()[1], queue.database.url

        @queue.job(max_attempts=1, timeout=20)
        def job(number: Number) -> None: ...

        job.enqueue(Number(0))
        queue.database.dialect.url = where.set(port=port).update_query_dict({"connect_timeout": "2"})  # type: ignore[attr-defined]
        with queue.database.session() as session:
            pid = session.execute("SELECT pg_backend_pid()")[0][0]
        with psycopg.connect(database_url, autocommit=True) as operator:
            operator.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        with at_most(3.5), pytest.raises(ConnectionLost):
            job.enqueue(Number(1))
