"""Faults that a worker survives, each made for real: its running jobs go on, nothing is lost, nothing is done twice, and people
are told once that it began and once that it ended."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

import dbqueue
from dbqueue import DBQueue, current_job, events
from dbqueue.database.tables import ClaimRequest, Turn
from dbqueue.errors import ConnectionLost, DatabaseBusy
from dbqueue.targets import Target
from tests.faults import Relay, both, make_standby, promote, small_disk, two_hosts
from tests.runtimes.jobs import Gate, Jobs, Nap, notes, open_gate
from tests.runtimes.lab import Process, Told, in_thread, record, wait_state
from tests.servers import Server
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]
Start = Callable[..., Process]


@dataclass(frozen=True)
class Number:
    n: int


class Work:
    """Jobs that note that they ran; those from 1,000 wait for ``go``."""

    def __init__(self, queue: DBQueue, timeout: float = 25.0) -> None:
        self.ran: list[int] = []
        self.go = threading.Event()

        @queue.job(max_attempts=3, timeout=timeout, name="job", retry=0.05)
        def job(number: Number) -> None:
            self.ran.append(number.n)
            if number.n >= 1_000:
                self.go.wait(20)

        self.target: Target[Number] = job

    def enqueue(self, *numbers: int) -> list[Any]:
        return [ref.id for ref in self.target.enqueue_many([Number(n) for n in numbers])]


def outlasting(queue: DBQueue, timeout: float) -> tuple[Target[None], list[float]]:
    """A job whose first attempt outlasts its timeout, and the list where it notes after how many seconds it was told so."""
    stopped: list[float] = []

    @queue.job(max_attempts=3, timeout=timeout, name="late", retry=0.05)
    def late() -> None:
        job = current_job()
        assert job is not None
        if job.attempt == 1:
            began = time.monotonic()
            job.wait(20)
            stopped.append(time.monotonic() - began)

    return late, stopped


@contextmanager
def working(queue: DBQueue, **options: Any) -> Iterator[Any]:
    """A worker in a thread that has begun."""
    with in_thread(queue, **options) as running:
        running.asleep()
        yield running


def told_once(told: Told) -> None:
    assert (len(told.of(events.DatabaseTrouble)), len(told.of(events.DatabaseBack))) == (1, 1), told
    assert not told.of(events.ClaimLost)


def lines(worker: Process, text: str) -> int:
    return worker.log.count(text)


# -- a peer that is silent ---------------------------------------------------------------------------------------------


def _vanish(jobs: Jobs, start: Start, url: str, within: float) -> None:
    """The host of the server goes without a word in the middle of a job, and comes back."""
    with two_hosts() as wire:
        relay = Relay(jobs.queue.database.url.render_as_string(hide_password=False), wire.address)
        try:
            worker = Process(relay.url + url, jobs.folder, "-c", 2, "--lease", 60, before=wire.prefix).started()
            running = jobs.gated.enqueue(Gate("g")).id
            wait_for(lambda: notes(jobs.folder, "start"))
            wire.cut()
            began = time.monotonic()
            wait_for(lambda: lines(worker, "trying again"), within, f"it was not noticed\n{worker.log}")
            noticed = time.monotonic() - began
            assert noticed > 0.9, "the network was cut at once, the worker is told by time alone"
            open_gate(jobs.folder, "g")
            after = jobs.quick.enqueue_many([Nap()] * 10)
            wait_for(lambda: notes(jobs.folder, "end"))
            wire.join()
            assert wait_state(jobs.queue, running, "succeeded", deadline=within + 15).attempt == 1
            for ref in after:
                assert wait_state(jobs.queue, ref.id, "succeeded").attempt == 1
            worker.signal(signal.SIGTERM)
            assert worker.ended() == 0
            print(f"noticed after {noticed:.1f} s")
        finally:
            worker.kill()
            relay.close()
    assert len(notes(jobs.folder, "start")) == 11
    assert (lines(worker, "trying again"), lines(worker, "the database is back")) == (1, 1), worker.log


@pytest.mark.req("D12", "D13", "D14")
@pytest.mark.databases("postgres")
def test_a_host_that_vanishes(jobs: Jobs, start: Start) -> None:
    _vanish(jobs, start, "?tcp_user_timeout=1500&connect_timeout=2", 8.0)


@pytest.mark.soak
@pytest.mark.req("D12", "D13", "D14")
@pytest.mark.databases("postgres")
def test_a_host_that_vanishes_is_noticed_in_half_a_minute(jobs: Jobs, start: Start) -> None:
    _vanish(jobs, start, "", 35.0)


@pytest.fixture
def relay(database_url: str) -> Iterator[Relay]:
    relay = Relay(database_url)
    yield relay
    relay.close()


@pytest.fixture
def through(relay: Relay, make_queue: MakeQueue) -> Iterator[DBQueue]:
    make_queue()
    queue = DBQueue(relay.url)
    yield queue
    relay.thaw()
    queue.close()


@pytest.mark.req("D13", "D14")
@pytest.mark.databases("postgres")
def test_a_server_that_takes_everything_and_answers_nothing(
    through: DBQueue, relay: Relay, make_queue: MakeQueue, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy whose way to the server is blocked, or a server that is stopped: every packet is acknowledged. New connections get no
    answer either, and meanwhile the loop goes round: a job that outlasts its timeout is told so in time."""
    monkeypatch.setattr("dbqueue.runtime.connection.SHORTEST_PATIENCE", 1.0)
    monkeypatch.setattr("dbqueue.runtime.connection.LONGEST_PATIENCE", 1.0)
    work, direct = Work(through), make_queue()
    watching = Work(direct)
    late, stopped = outlasting(through, timeout=2.5)

    with working(through, slots=3):
        first = work.enqueue(1_000, 1_001)
        second = late.enqueue().id
        told.wait(events.JobStarted, 3)
        relay.freeze()
        began = time.monotonic()
        trouble = told.wait(events.DatabaseTrouble)[0]
        assert 0.5 < time.monotonic() - began < 6.0
        assert trouble.error == "ConnectionLost: no answer for 1 s"
        more = watching.enqueue(*range(10))
        work.go.set()
        wait_for(lambda: stopped, 5)
        assert stopped[0] < 5.0, "nobody watched its time meanwhile"
        relay.thaw()
        told.wait(events.DatabaseBack, deadline=15)
        for job in (*first, *more):
            assert wait_state(direct, job, "succeeded").attempt == 1
        assert wait_state(through, second, "succeeded").attempt == 2
    assert sorted(work.ran) == [*range(10), 1_000, 1_001]
    told_once(told)


@pytest.mark.req("D19")
@pytest.mark.databases("postgres")
def test_a_worker_that_is_to_end_does_not_wait_for_a_silent_server(through: DBQueue, relay: Relay, told: Told) -> None:
    Work(through)
    with working(through, slots=1, shutdown=0.1) as running:
        relay.freeze()
        session = running.worker.connection.session
        wait_for(lambda: time.monotonic() - session.asked_at > 0.2)
        began = time.monotonic()
        running.stop()
        try:
            assert running.ended(4) == 0
        finally:
            relay.thaw()
        print(f"ended after {time.monotonic() - began:.1f} s")


# -- a server that refuses ---------------------------------------------------------------------------------------------


@pytest.mark.req("D12", "D13")
@pytest.mark.databases("postgres")
def test_a_server_that_turns_read_only(make_server: Callable[..., Server], told: Told) -> None:
    """By its settings: our own transactions say that they write, once we know."""
    server = make_server()
    queue = DBQueue(server.dsn(server.create_database()))
    queue.migrate()
    work = Work(queue)
    with working(queue, slots=3) as running:
        held = work.enqueue(1_000)
        told.wait(events.JobStarted)
        server.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        server.execute("SELECT pg_reload_conf()")
        wait_for(lambda: server.execute("SHOW default_transaction_read_only") == [("on",)])
        after = work.enqueue(*range(20))
        told.wait(events.DatabaseTrouble)
        told.wait(events.DatabaseBack)
        work.go.set()
        for job in (*held, *after):
            assert wait_state(queue, job, "succeeded").attempt == 1
        running.asleep()
    queue.close()
    assert sorted(work.ran) == [*range(20), 1_000]
    told_once(told)


@pytest.mark.req("D12", "D13")
@pytest.mark.databases("postgres")
def test_a_failover_to_a_standby(make_server: Callable[..., Server], told: Told) -> None:
    """The primary dies; its standby lets everybody in and refuses to write, until it is promoted. Running jobs go on."""
    primary = make_server(18, wal_level="replica", hot_standby="on")
    name = primary.create_database()
    first = DBQueue(primary.dsn(name))
    first.migrate()
    first.close()
    standby = make_standby(primary, make_server)
    primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.execute("SELECT pg_reload_conf()")
    wait_for(lambda: primary.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))
    queue = DBQueue(both(primary, standby, name, {"connect_timeout": 2}))
    work = Work(queue)
    with working(queue, slots=4):
        for job in work.enqueue(*range(10)):
            wait_state(queue, job, "succeeded")
        held = work.enqueue(1_000, 1_001)
        waiting = work.target.enqueue(Number(20), delay=1.0).id
        told.wait(events.JobStarted, 12)
        primary.stop("immediate")
        told.wait(events.DatabaseTrouble)
        work.go.set()
        threading.Event().wait(0.5)
        with pytest.raises(ConnectionLost):
            work.enqueue(99)
        promote(standby)
        told.wait(events.DatabaseBack)
        for job in (*held, waiting, *work.enqueue(*range(30, 40))):
            assert wait_state(queue, job, "succeeded").attempt == 1
        counts = {state: n for state, n in queue.counts().items() if n}
    queue.close()
    assert counts == {"succeeded": 23}
    assert sorted(work.ran) == [*range(10), 20, *range(30, 40), 1_000, 1_001]
    told_once(told)


CROWD = 12


@pytest.fixture
def crowded(make_server: Callable[..., Server]) -> tuple[Server, str]:
    """A server for few, and a database with tables on it."""
    server = make_server(18, max_connections=str(CROWD), superuser_reserved_connections="0", reserved_connections="0")
    name = server.create_database()
    queue = DBQueue(server.dsn(name))
    queue.migrate()
    queue.close()
    return server, name


def _crowd(url: str, stack: ExitStack, connections: int) -> None:
    """Takes so many connections; those that were closed just now may still count at the server."""

    def taken() -> bool:
        try:
            stack.enter_context(psycopg.connect(url))
        except psycopg.OperationalError:
            return False
        return True

    for _ in range(connections):
        wait_for(taken)


@pytest.mark.req("D12", "D13")
@pytest.mark.databases("postgres")
def test_no_connection_is_left(crowded: tuple[Server, str], told: Told) -> None:
    server, name = crowded
    queue = DBQueue(server.dsn(name))
    work = Work(queue)
    with ExitStack() as crowd, working(queue, slots=2) as running:
        held = work.enqueue(1_000)
        told.wait(events.JobStarted)
        queue.database._connections().dispose()
        running.cut(until=lambda: _crowd(server.dsn(name), crowd, CROWD))
        told.wait(events.DatabaseTrouble)
        wait_for(lambda: running.worker.connection._tries >= 4, message="it does not try again")
        with pytest.raises(ConnectionLost, match="too many connections"):
            queue.database.open_session()
        work.go.set()
        wait_for(lambda: running.worker.slots.idle == 2)
        crowd.close()
        told.wait(events.DatabaseBack)
        assert wait_state(queue, held[0], "succeeded").attempt == 1
        for job in work.enqueue(0, 1, 2):
            wait_state(queue, job, "succeeded")
    queue.close()
    assert sorted(work.ran) == [0, 1, 2, 1_000]
    told_once(told)


@pytest.mark.req("D19")
@pytest.mark.databases("postgres")
def test_a_worker_that_finds_no_connection_at_its_start_says_so(
    crowded: tuple[Server, str], tmp_path: Path, told: Told
) -> None:
    server, name = crowded
    with ExitStack() as crowd:
        _crowd(server.dsn(name), crowd, CROWD)
        worker = Process(server.dsn(name), tmp_path, "-c", 1)
        assert worker.ended() not in (0, 75)
    assert "too many connections" in worker.log, worker.log
    assert "Traceback" not in worker.log


@pytest.mark.req("D12", "D13")
@pytest.mark.databases("postgres")
def test_a_server_that_is_shutting_down_and_starting_up(
    postgres: Server, database_url: str, make_queue: MakeQueue, told: Told
) -> None:
    """It lets nobody in (57P03) as long as somebody is still there; then it is away."""
    queue = make_queue()
    work = Work(queue)
    with working(queue, slots=2) as running:
        held = work.enqueue(1_000)
        told.wait(events.JobStarted)
        with psycopg.connect(database_url) as guest:
            assert postgres._process is not None
            postgres._process.send_signal(signal.SIGTERM)
            running.cut()
            told.wait(events.DatabaseTrouble)
            wait_for(lambda: running.worker.connection._tries >= 3, message="it does not try again")
            with pytest.raises(psycopg.OperationalError, match="shutting down"):
                psycopg.connect(database_url)
            work.go.set()
            guest.close()
        queue.database._connections().dispose()
        postgres.stop("fast")
        postgres.start()
        told.wait(events.DatabaseBack)
        assert wait_state(queue, held[0], "succeeded").attempt == 1
    assert work.ran == [1_000]
    told_once(told)


# -- no room -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D12", "D13")
@pytest.mark.databases("postgres")
def test_a_full_disk(make_server: Callable[..., Server], told: Told) -> None:
    """Outcomes wait until there is room again: they are neither given up nor run once more."""
    server = make_server()
    with small_disk(server.home, owner=server._account) as disk:
        server.execute(f"CREATE TABLESPACE small LOCATION '{disk.path}'")
        name = server.create_database()
        server.execute(f"ALTER DATABASE {name} SET TABLESPACE small")
        queue = DBQueue(server.dsn(name))
        queue.migrate()
        _fill(queue, told, disk.fill, disk.free)
        queue.close()
        server.stop("immediate")


@pytest.mark.req("D12", "D13")
@pytest.mark.databases("sqlite")
def test_a_full_disk_under_a_file(told: Told, tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        queue = DBQueue(f"sqlite:///{disk.path}/queue.db")
        queue.migrate()
        # Somebody reads all the time, so that the log cannot begin anew in the room that it has.
        reader = sqlite3.connect(f"{disk.path}/queue.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM dbqueue_jobs").fetchone()
        _fill(queue, told, disk.fill, disk.free)
        reader.close()
        queue.close()


def _fill(queue: DBQueue, told: Told, fill: Callable[[], None], free: Callable[[], None]) -> None:
    work = Work(queue)
    with working(queue, slots=101) as running:
        held = work.enqueue(*range(1_000, 1_100))
        told.wait(events.JobStarted, 100)
        running.asleep()
        fill()
        work.go.set()
        told.wait(events.DatabaseTrouble)

        def tried() -> bool:
            fill()  # a server that removes a file of its own makes room
            return bool(running.worker.connection._tries >= 4)

        wait_for(tried, message="it does not try again")
        free()
        told.wait(events.DatabaseBack)
        for job in held:
            found = wait_state(queue, job, "succeeded")
            assert (found.attempt, found.lapses) == (1, 0)
        for job in work.enqueue(0, 1, 2):
            wait_state(queue, job, "succeeded")
    assert sorted(work.ran) == [0, 1, 2, *range(1_000, 1_100)]
    told_once(told)


# -- SQLite's file -----------------------------------------------------------------------------------------------------


@contextmanager
def _locked(queue: DBQueue) -> Iterator[None]:
    """Somebody has locked all of it, and takes his time."""
    if queue.database.dialect.name != "sqlite":
        with psycopg.connect(queue.database.url.render_as_string(hide_password=False)) as session:
            session.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
            yield
        return
    other = sqlite3.connect(str(queue.database.url.database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("COMMIT")
        other.close()


@pytest.mark.req("D12", "D13", "D14")
@pytest.mark.databases("sqlite")
def test_a_file_that_is_locked_for_less_than_a_lease(make_queue: MakeQueue, told: Told) -> None:
    """Longer than any of our statements tries for the lock: outcomes and renewals wait."""
    queue = make_queue(lease=30)
    work = Work(queue)
    with working(queue, slots=4):
        held = work.enqueue(1_000, 1_001)
        told.wait(events.JobStarted, 2)
        with _locked(queue):
            work.go.set()
            threading.Event().wait(2.5)
        for job in (*held, *work.enqueue(0, 1)):
            found = wait_state(queue, job, "succeeded")
            assert (found.attempt, found.lapses) == (1, 0)
    assert sorted(work.ran) == [0, 1, 1_000, 1_001]
    assert not told.of(events.ClaimLost)


@pytest.mark.req("D12", "D13", "D14")
@pytest.mark.databases("sqlite")
def test_a_file_that_is_locked_for_longer_than_a_lease(make_queue: MakeQueue, told: Told) -> None:
    """Nobody could renew, so the claims have ended: what ran is run again, once, and the first outcome is not recorded."""
    queue = make_queue(lease=1.0)
    work = Work(queue, timeout=0.9)
    with working(queue, slots=4) as running:
        held = work.enqueue(1, 1_000, 1_001)
        told.wait(events.JobStarted, 3)
        wait_state(queue, held[0], "succeeded")
        with _locked(queue):
            work.go.set()
            threading.Event().wait(2.0)
            assert running.alive
        for job in held[1:]:
            found = wait_state(queue, job, "succeeded")
            assert (found.attempt, found.lapses) == (2, 1)
        counts = {state: n for state, n in queue.counts().items() if n}
    assert counts == {"succeeded": 3}
    assert sorted(work.ran) == [1, 1_000, 1_000, 1_001, 1_001]


@pytest.mark.req("D12", "D13")
@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("how", ["moved away", "replaced"])
def test_a_file_that_goes_away(make_queue: MakeQueue, told: Told, tmp_path: Path, how: str) -> None:
    """SQLite would go on in the old file, where nobody sees what is written. Nobody does: not the worker, not those who enqueue; and
    nobody makes a new file."""
    queue = make_queue()
    work = Work(queue)
    path = Path(str(queue.database.url.database))
    names = [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))]
    with working(queue, slots=4) as running:
        held = work.enqueue(1_000)
        told.wait(events.JobStarted)
        running.asleep()
        for name in names:
            name.rename(tmp_path / f"kept-{name.name}")
        if how == "replaced":
            with sqlite3.connect(path) as other:
                other.execute("CREATE TABLE others (n)")
            other.close()
        trouble = told.wait(events.DatabaseTrouble)[0]
        assert ("replaced" if how == "replaced" else "deleted or moved away") in trouble.error
        with pytest.raises(ConnectionLost, match="replaced" if how == "replaced" else "deleted or moved away"):
            work.enqueue(99)
        work.go.set()
        wait_for(lambda: running.worker.connection._tries >= 3, message="it does not try again")
        assert path.exists() == (how == "replaced"), "it made a new one"
        for name in names:
            (tmp_path / f"kept-{name.name}").replace(name)
        told.wait(events.DatabaseBack)
        for job in (*held, *work.enqueue(0)):
            assert wait_state(queue, job, "succeeded").attempt == 1
    assert sorted(work.ran) == [0, 1_000]
    told_once(told)


# -- the database's clock ----------------------------------------------------------------------------------------------

HOUR = 3_600


def _claimed_by_a_dead_worker(queue: DBQueue, lease: float) -> None:
    with queue.database.session() as session:
        claim = ClaimRequest(("default",), 1, "dead", b"t" * 16, round(lease * 1e6))
        assert len(queue.database.dialect.turn(session, Turn(claim=claim)).claimed) == 1


@pytest.mark.req("H14", "D12")
@pytest.mark.parametrize("when", ["a worker saw it", "before the worker came"])
def test_a_dead_workers_job_does_not_wait_for_a_clock_that_went_back(make_queue: MakeQueue, when: str) -> None:
    """An hour back: its lease would end an hour late. It counts as renewed at the jump; a live worker's claim does too."""
    queue = make_queue(poll=0.05)
    work = Work(queue)
    dead = work.enqueue(1)[0]
    _claimed_by_a_dead_worker(queue, 60)
    if when == "before the worker came":
        queue.database.clock.advance(-HOUR)
    with in_thread(queue, slots=2) as running:
        running.asleep()
        live = work.enqueue(1_000)[0]
        wait_state(queue, live, "running")
        if when == "a worker saw it":
            queue.database.clock.advance(-HOUR)
        threading.Event().wait(0.3)
        assert record(queue, dead).state == "running", "it has its lease from the jump on"
        queue.database.clock.advance(59)
        threading.Event().wait(0.3)
        assert record(queue, dead).state == "running"
        queue.database.clock.advance(1.5)
        found = wait_state(queue, dead, "succeeded")
        assert (found.attempt, found.lapses) == (2, 1)
        work.go.set()


@pytest.mark.req("H14", "D12", "D13", "D8")
def test_a_clock_that_jumps_forward_ends_every_lease_at_once(make_queue: MakeQueue, told: Told) -> None:
    """Fairly: who held a job loses it, whatever it answers; it costs an attempt and a lapse, and the job is done by the next."""
    queue = make_queue(poll=0.05)
    work = Work(queue)
    later = work.target.enqueue(Number(5), delay=1_800).id
    far = work.target.enqueue(Number(6), delay=2 * HOUR).id
    with in_thread(queue, slots=4):
        held = work.enqueue(1_000, 1_001)
        told.wait(events.JobStarted, 2)
        queue.database.clock.advance(HOUR)
        wait_for(lambda: work.ran.count(1_000) == work.ran.count(1_001) == 2)
        work.go.set()
        for job in held:
            found = wait_state(queue, job, "succeeded")
            assert (found.attempt, found.lapses) == (2, 1)
        wait_state(queue, later, "succeeded")
        assert record(queue, far).state == "pending"
        wait_for(lambda: len(told.of(events.ClaimLost)) == 2)
        for n in range(20):  # with marks that lie an hour ahead by now
            wait_state(queue, work.enqueue(n)[0], "succeeded")
        queue.database.clock.advance(-HOUR)
        for n in range(20, 40):
            wait_state(queue, work.enqueue(n)[0], "succeeded")
        soon = work.target.enqueue(Number(50), delay=0.3).id
        wait_state(queue, soon, "succeeded", deadline=3)
        assert record(queue, far).state == "pending"
    assert sorted(work.ran) == sorted([5, *range(40), 50, 1_000, 1_000, 1_001, 1_001])
    assert sum(event.again for event in told.of(events.LeasesExpired)) == 2


@pytest.mark.req("H14")
def test_history_is_kept_as_long_as_it_should_when_the_clock_went_back(make_queue: MakeQueue) -> None:
    """Jobs that ended in what is now the future are pruned late, never early."""
    queue = make_queue()
    work = Work(queue)
    with in_thread(queue, slots=1):
        old = work.enqueue(1)[0]
        wait_state(queue, old, "succeeded")
        queue.database.clock.advance(-HOUR)
        wait_state(queue, work.enqueue(2)[0], "succeeded")
    assert queue.purge(["succeeded"], older_than=60) == 0
    queue.database.clock.advance(61)
    assert queue.purge(["succeeded"], older_than=60) == 1
    queue.database.clock.advance(HOUR)
    assert queue.purge(["succeeded"], older_than=60) == 1


# -- locks of others ---------------------------------------------------------------------------------------------------


@pytest.mark.req("D12", "D13", "D14", "D19")
@pytest.mark.databases("postgres")
def test_a_table_that_is_locked(make_queue: MakeQueue, database_url: str, told: Told) -> None:
    """ALTER TABLE, LOCK TABLE, VACUUM FULL: the loop goes round meanwhile, so a job is told of its timeout, and its outcome waits."""
    queue = make_queue()
    work = Work(queue)
    late, stopped = outlasting(queue, timeout=2.0)

    with working(queue, slots=4):
        held = work.enqueue(1_000)
        second = late.enqueue().id
        told.wait(events.JobStarted, 2)
        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
            work.go.set()
            wait_for(lambda: stopped, 6)
            assert stopped[0] < 4.0, "nobody watched its time meanwhile"
        assert wait_state(queue, held[0], "succeeded").attempt == 1
        assert wait_state(queue, second, "succeeded").attempt == 2
        for job in work.enqueue(0, 1):
            assert wait_state(queue, job, "succeeded").attempt == 1
    assert sorted(work.ran) == [0, 1, 1_000]
    assert not told.of(events.ClaimLost)


@pytest.mark.req("D13")
def test_people_are_told_once_that_somebody_locks_everything(make_queue: MakeQueue, told: Told) -> None:
    """SQLite's file, or PostgreSQL's table, for seconds: which is not routine any more."""
    queue = make_queue(lease=30)
    work = Work(queue)
    with in_thread(queue, slots=2):
        held = work.enqueue(1_000)
        told.wait(events.JobStarted)
        with _locked(queue):
            work.go.set()
            assert told.wait(events.DatabaseTrouble)[0].error.startswith("DatabaseBusy")
        told.wait(events.DatabaseBack)
        assert wait_state(queue, held[0], "succeeded").attempt == 1
        for job in work.enqueue(0, 1):
            assert wait_state(queue, job, "succeeded").attempt == 1
    told_once(told)


@pytest.mark.req("D19")
@pytest.mark.databases("postgres")
def test_a_worker_ends_although_a_table_is_locked(jobs: Jobs, database_url: str, start: Start) -> None:
    worker = start("-c", 1, "--lease", 60, "--shutdown", 0.2).started()
    job = jobs.gated.enqueue(Gate("g")).id
    wait_for(lambda: notes(jobs.folder, "start"))
    with psycopg.connect(database_url) as other:
        other.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
        threading.Event().wait(0.5)
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.ended(10) == 0
        print(f"ended after {time.monotonic() - began:.1f} s")
    assert "1 left to their lease" in worker.log
    assert record(jobs.queue, job).state == "running", "left to its lease"


@pytest.mark.req("D5")
@pytest.mark.databases("postgres")
@pytest.mark.parametrize("way", ["cursor", "wire"])
def test_a_statement_that_is_interrupted(queue: DBQueue, database_url: str, way: str) -> None:
    """Ctrl-C while it waits for an answer: nobody takes it for a lost connection, and no later statement gets this one's answer."""
    work = Work(queue)
    work.target.enqueue(Number(0))

    def wait_for_the_lock() -> None:
        if way == "cursor":
            work.target.enqueue(Number(1))
        else:
            with queue.database.session() as session:
                session.planned(("SELECT count(*) FROM dbqueue_jobs", {}))  # type: ignore[attr-defined]

    with psycopg.connect(database_url) as other, psycopg.connect(database_url, autocommit=True) as watch:
        other.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")

        def interrupt() -> None:
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            wait_for(lambda: watch.execute(waiting).fetchone())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            wait_for_the_lock()
        thread.join()
    assert queue.get_job(work.target.enqueue(Number(2)).id) is not None


@pytest.mark.req("D5", "D8")
@pytest.mark.databases("postgres")
def test_an_enqueue_that_waits_for_its_own_thread_is_told_so(queue: DBQueue, database_url: str) -> None:
    """The open transaction of this thread has written the key; on a connection of our own the next enqueue would wait for its end."""
    work = Work(queue)
    dialect: Any = queue.database.dialect
    dialect._enqueue_own = dialect._enqueue_own.replace("10s", "400ms")
    work.target.enqueue(Number(0))
    with psycopg.connect(database_url) as own:
        with dbqueue.using(own):
            first = work.target.enqueue(Number(1), key="k")
        began = time.monotonic()
        with pytest.raises(DatabaseBusy, match=r"inside using\(\.\.\.\)"):
            work.target.enqueue(Number(1), key="k")
        assert time.monotonic() - began < 8
        assert own.execute("SHOW lock_timeout").fetchone() == ("0",), "ours is not the caller's"
    with queue.database.session() as session:
        assert session.execute("SHOW lock_timeout")[0][0] in ("0", b"0"), "it is gone with the statement"
    again = work.target.enqueue(Number(1), key="k")
    assert (again.id, again.duplicate) == (first.id, True)


@pytest.mark.soak
@pytest.mark.req("D5", "D8")
@pytest.mark.databases("postgres")
@pytest.mark.parametrize("count", [1, 3])
def test_an_enqueue_waits_ten_seconds_for_a_key(queue: DBQueue, database_url: str, count: int) -> None:
    work = Work(queue)
    with psycopg.connect(database_url) as own:
        with dbqueue.using(own):
            work.target.enqueue(Number(1), key="k")
        began = time.monotonic()
        with pytest.raises(DatabaseBusy, match="commit first"):
            work.target.enqueue_many([Number(n) for n in range(count)], keys=["k", None, None][:count])
        assert 9 < time.monotonic() - began < 15
