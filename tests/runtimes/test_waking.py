"""How soon a job starts when its worker sleeps. The poll is 30 s throughout, so whatever starts in time was woken."""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import dbqueue
from dbqueue import DBQueue, events, ids
from dbqueue.runtime.wake import Wake
from dbqueue.states import State
from dbqueue.targets import Target
from tests.factory import make
from tests.runtimes.jobs import Gate, Jobs, Nap, notes
from tests.runtimes.lab import Process, Told, in_thread, record, wait_all, wait_state
from tests.servers import Server
from tests.waiting import wait_for

POLL = 30
SOON = 1.0
"""Seconds: a thirtieth of the poll, and hundreds of times what it takes on an idle machine."""

MakeQueue = Callable[..., DBQueue]


@dataclass(frozen=True)
class Number:
    n: int


@dataclass
class Stage:
    """A worker's queue, and another one on the same database, as another process has it. ``starts``: when which job
    started."""

    queue: DBQueue
    job: Target[Number]
    elsewhere: Target[Number]
    starts: dict[int, float]
    go: threading.Event
    """Jobs from number 1,000 on wait for it."""

    def start(self, n: int) -> float:
        wait_for(lambda: n in self.starts, 25, f"job {n} did not start")
        return self.starts[n]


@pytest.fixture
def stage(make_queue: MakeQueue) -> Iterator[Stage]:
    queue, other = make_queue(poll=POLL), make_queue()  # a producer's own poll tells nothing about a worker's
    other.counts()  # its first connection takes a while on a busy machine
    starts: dict[int, float] = {}
    go = threading.Event()

    def declare(queue: DBQueue) -> Target[Number]:
        @queue.job(max_attempts=3, timeout=25, retry=0.2, name="job")
        def job(number: Number) -> None:
            again = number.n in starts
            starts[-number.n if again else number.n] = time.monotonic()
            if number.n == 500 and not again:
                raise ValueError
            if number.n >= 1_000:
                go.wait(20)

        return job

    yield Stage(queue, declare(queue), declare(other), starts, go)
    go.set()


@contextlib.contextmanager
def transaction(queue: DBQueue) -> Iterator[Any]:
    """A transaction of the application's own."""
    url = queue.database.url
    if queue.database.dialect.name == "sqlite":
        connection: Any = sqlite3.connect(str(url.database), timeout=10)
    else:
        connection = psycopg.connect(url.render_as_string(hide_password=False))
    try:
        with dbqueue.using(connection):
            yield connection
        connection.commit()
    finally:
        connection.close()


# -- a sleeping worker -------------------------------------------------------------------------------------------------


def test_a_job_wakes_the_worker(stage: Stage) -> None:
    lags = []
    with in_thread(stage.queue, slots=2) as running:
        for n in range(10):
            running.asleep()
            enqueued = time.monotonic()
            (stage.job if n % 2 else stage.elsewhere).enqueue(Number(n))
            lags.append(stage.start(n) - enqueued)
    assert max(lags) < SOON
    assert statistics.median(lags) < 0.1


@pytest.mark.databases("postgres")
def test_a_notification_in_the_middle_of_a_look_is_heard(stage: Stage) -> None:
    """What a statement of the sleeper's own has read from the wire does not make the descriptor readable any more."""
    database = stage.queue.database
    with contextlib.closing(database.open_session()) as session, contextlib.closing(Wake()) as wake:
        sleeper = database.sleeper(session, ("default",))
        assert sleeper is not None
        with contextlib.closing(sleeper):
            sleeper.announce()
            assert sleeper.announced
            stage.elsewhere.enqueue(Number(0))
            sleeper.look()
            began = time.monotonic()
            assert wake.wait(20, sleeper)
            assert time.monotonic() - began < SOON


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_jobs_of_a_callers_transaction_wake_it_with_the_commit(stage: Stage, many: bool) -> None:
    with in_thread(stage.queue, slots=4) as running:
        running.asleep()
        with transaction(stage.queue):
            if many:
                stage.elsewhere.enqueue_many([Number(n) for n in range(4)])
            else:
                stage.elsewhere.enqueue(Number(0))
            threading.Event().wait(0.1)
            assert not stage.starts, "before the commit there is no job"
            committed = time.monotonic()
        assert stage.start(0) - committed < SOON


@pytest.mark.databases("postgres")
@pytest.mark.req("D5")
@pytest.mark.parametrize(("delay", "rounds"), [(None, 25), (0.05, 8)], ids=["due", "due in a moment"])
def test_no_wake_up_is_lost_to_a_transaction_that_was_open_when_the_worker_fell_asleep(
    stage: Stage, told: Told, delay: float | None, rounds: int
) -> None:
    """The producer looks for sleepers while the worker is busy, so it rings nobody; the worker looks for jobs before
    the commit, so it finds none, and sleeps. Only its later looks can find the job."""
    lags = []
    with in_thread(stage.queue, slots=1) as running:
        for n in range(rounds):
            stage.go.clear()
            busy = 1_000 + n
            stage.elsewhere.enqueue(Number(busy))
            stage.start(busy)
            with transaction(stage.queue):
                stage.elsewhere.enqueue(Number(n), delay=delay)
                stage.go.set()
                wait_for(lambda: running.worker.connection.sleeper and running.worker.connection.sleeper.announced)
                threading.Event().wait(0.1)
                committed = time.monotonic()
            lags.append(stage.start(n) - committed)
            told.wait(events.JobEnded, 2 * n + 2)
    assert max(lags) < SOON, "as late as the poll"
    assert statistics.median(lags) < 0.3


# -- jobs of the near future -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.1, 0.5])
def test_a_job_of_the_near_future_starts_in_time(stage: Stage, delay: float) -> None:
    with in_thread(stage.queue, slots=2) as running:
        for n, target in enumerate((stage.job, stage.elsewhere)):
            running.asleep()
            began = time.monotonic()
            target.enqueue(Number(n), delay=delay)
            assert delay - 0.005 <= stage.start(n) - began < delay + SOON


def test_a_job_of_the_near_future_starts_in_time_though_the_worker_was_busy(stage: Stage) -> None:
    """All slots were busy when it was written, so nobody was rung; no other thing reminds the worker."""
    with in_thread(stage.queue, slots=1):
        stage.elsewhere.enqueue(Number(1_000))
        stage.start(1_000)
        began = time.monotonic()
        stage.elsewhere.enqueue(Number(0), delay=0.4)
        stage.go.set()
        assert 0.395 <= stage.start(0) - began < 0.4 + SOON


def test_a_retry_starts_in_time(stage: Stage) -> None:
    """The worker's own commit rings nobody."""
    with in_thread(stage.queue, slots=1):
        stage.job.enqueue(Number(500))
        first = stage.start(500)
        assert 0.195 <= stage.start(-500) - first < 0.2 + SOON


# -- other verbs that make a job claimable -----------------------------------------------------------------------------


def test_a_job_retried_by_hand_wakes_the_worker(stage: Stage) -> None:
    database = stage.queue.database
    columns = {
        "target": "job", "fingerprint": stage.job.schema.fingerprint, "timeout_ms": 5_000,
    }  # fmt: skip
    dead, blocked = (
        make(database, state, payload=stage.job.schema.encode(Number(n)), **columns)
        for n, state in enumerate((State.DEAD, State.BLOCKED))
    )
    with in_thread(stage.queue, slots=1) as running:
        for n, job in enumerate((dead, blocked)):
            running.asleep()
            began = time.monotonic()
            stage.queue.retry(ids.as_uuid(job.id))
            assert stage.start(n) - began < SOON


def test_a_job_handed_back_by_another_worker_wakes_this_one(stage: Stage) -> None:
    with in_thread(stage.queue, slots=1) as first:
        stage.job.enqueue(Number(1_000))
        stage.start(1_000)
        with in_thread(stage.queue, slots=1) as second:
            second.asleep()
            first.stop()
            first.stop()
            handed_back = time.monotonic()
            assert stage.start(-1_000) - handed_back < SOON
            stage.go.set()


def test_the_job_of_a_lost_worker_wakes_another_one(make_queue: MakeQueue) -> None:
    """Nobody rings when a lease ends; the worker must look by itself, and not only every 30 s."""
    queue = make_queue(poll=POLL, lease=0.8)
    ran = threading.Event()

    @queue.job(max_attempts=3, timeout=0.5)
    def job() -> None:
        ran.set()

    with in_thread(queue, slots=1) as running:
        running.asleep()
        now = queue.database.read(queue.database.dialect.now)
        lost = make(
            queue.database, State.RUNNING, target=job.name, fingerprint=job.schema.fingerprint, timeout_ms=500,
            payload=job.schema.encode(None), lease_until=now + 400_000,
        )  # fmt: skip
        assert ran.wait(3)
        found = wait_state(queue, ids.as_uuid(lost.id), "succeeded")
        assert (found.attempt, found.lapses) == (2, 1)


# -- without notifications, and when listening fails -------------------------------------------------------------------


@pytest.mark.databases("postgres")
def test_without_notifications_the_poll_serves(make_queue: MakeQueue, postgres: Server) -> None:
    queue = make_queue(poll=0.1, notify=False)
    lags: list[float] = []

    @queue.job(max_attempts=1, timeout=5)
    def job() -> None:
        lags.append(time.monotonic())

    with in_thread(queue, slots=1) as running:
        wait_for(lambda: running.worker._claim_at > time.monotonic())
        began = time.monotonic()
        job.enqueue()
        wait_for(lambda: lags)
        assert lags[0] - began < 0.1 + SOON
        assert running.worker.connection.sleeper is None
        assert not postgres.execute("SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'")
        assert not postgres.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'")


@pytest.mark.databases("postgres")
def test_a_lost_listening_connection_is_made_again_and_loses_no_job(stage: Stage, told: Told, postgres: Server) -> None:
    with in_thread(stage.queue, slots=1) as running:
        for n in range(3):
            running.asleep()
            listener = running.worker.connection.sleeper
            pid = listener._connection.info.backend_pid  # type: ignore[union-attr]
            postgres.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
            began = time.monotonic()
            stage.elsewhere.enqueue(Number(n))  # nobody is there to be rung
            assert stage.start(n) - began < SOON
            wait_for(lambda: running.worker.connection.sleeper not in (None, listener))  # noqa: B023
        running.asleep()
        began = time.monotonic()
        stage.elsewhere.enqueue(Number(9))
        assert stage.start(9) - began < SOON
    assert not told.of(events.DatabaseTrouble), "the worker's own connection was never lost"


@pytest.mark.databases("postgres")
def test_a_producer_that_died_with_the_lock_does_not_make_the_worker_spin(stage: Stage, postgres: Server) -> None:
    """It tried the gate and hangs before the unlock: the worker cannot announce its sleep, so it polls, further and
    further apart."""
    queue = stage.queue
    with in_thread(queue, slots=1) as running:
        running.asleep()
        keys = running.worker.connection.sleeper._keys  # type: ignore[union-attr]
    with psycopg.connect(queue.database.url.render_as_string(hide_password=False), autocommit=True) as producer:
        producer.execute("SELECT pg_advisory_lock(k) FROM unnest(%s::bigint[]) k", (keys,))
        with in_thread(queue, slots=1) as running:
            sleeper: Any = wait_for(lambda: running.worker.connection.sleeper)
            tries = 0
            announce = sleeper.announce

            def counted() -> None:
                nonlocal tries
                tries += 1
                announce()

            sleeper.announce = counted
            threading.Event().wait(1.0)
            assert not sleeper.announced
            assert 1 <= tries <= 12
            producer.execute("SELECT pg_advisory_unlock_all()")
            stage.elsewhere.enqueue(Number(0))
            assert stage.start(0)


# -- other processes ---------------------------------------------------------------------------------------------------


def test_a_job_of_another_process_wakes_the_worker(jobs: Jobs, start: Callable[..., Process]) -> None:
    start("-c", 2, "--lease", 60, options={"poll": POLL}).started()
    lags = []
    for n in range(8):
        counts = {"succeeded": n} if n else {}
        wait_all(jobs.queue, lambda found, counts=counts: found == counts)  # type: ignore[misc]
        threading.Event().wait(0.05)  # it falls asleep
        began = time.monotonic()
        job = str(jobs.quick.enqueue(Nap()).id)
        started = wait_for(lambda: [line.at for line in notes(jobs.folder) if line.job == job])  # noqa: B023
        lags.append(started[0] - began)
    assert max(lags) < SOON
    assert statistics.median(lags) < 0.1


def test_a_job_handed_back_by_a_process_wakes_another(jobs: Jobs, start: Callable[..., Process]) -> None:
    first = start("-c", 1, "--lease", 60, options={"poll": POLL}).started()
    ref = jobs.gated.enqueue(Gate("g"))
    wait_for(lambda: notes(jobs.folder, "start"))
    start("-c", 1, "--lease", 60, options={"poll": POLL}).started()
    threading.Event().wait(0.3)  # it falls asleep
    first.stop_twice()
    wait_for(lambda: notes(jobs.folder, "cancelled"))
    cancelled = notes(jobs.folder, "cancelled")[0].at
    again = wait_for(lambda: notes(jobs.folder, "start")[1:])[0]
    assert again.at - cancelled < SOON
    assert record(jobs.queue, ref.id).attempt == 1
