"""How a worker ends: what runs may end, what cannot is handed back, what waits is left alone, and nothing holds it up
for ever."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dbqueue import DBQueue, current_job, events
from dbqueue.errors import DatabaseBusy
from dbqueue.runtime import stopping
from dbqueue.targets import Target
from tests.runtimes.jobs import Gate, Jobs, notes, open_gate
from tests.runtimes.lab import Process, Told, in_thread, record, wait_state
from tests.servers import Server
from tests.waiting import wait_for

Start = Callable[..., Process]


@pytest.mark.req("D19")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(jobs: Jobs, start: Start, number: signal.Signals) -> None:
    worker = start("-c", 1, "--lease", 60).started()
    running, waiting = (jobs.gated.enqueue(Gate("g")).id for _ in range(2))
    wait_for(lambda: notes(jobs.folder, "start"))
    worker.signal(number)
    wait_for(lambda: f"stops ({number.name}), 1 jobs running" in worker.log)
    open_gate(jobs.folder, "g")
    assert worker.ended() == 0
    assert record(jobs.queue, running).state == "succeeded"
    left = record(jobs.queue, waiting)
    assert (left.state, left.attempt, left.worker) == ("pending", 0, None)
    assert [line.what for line in notes(jobs.folder)] == ["start", "end"]
    assert "1 jobs ended, 0 handed back, 0 left to their lease" in worker.log


@pytest.mark.req("D19", "D12")
@pytest.mark.parametrize("kind", ["gated", "deaf"])
def test_the_second_signal_hands_back_at_once(jobs: Jobs, start: Start, kind: str) -> None:
    """A job that looks at its flag, and one that does not: both are pending again, and the attempt is not counted."""
    worker = start("-c", 1, "--lease", 60).started()
    ref = jobs.target(kind).enqueue(Gate("never"))
    wait_for(lambda: notes(jobs.folder, "start"))
    worker.stop_twice()
    began = time.monotonic()
    assert worker.ended() == 0
    assert time.monotonic() - began < 3
    found = record(jobs.queue, ref.id)
    assert (found.state, found.attempt, found.error_kind) == ("pending", 0, "released")
    assert found.ready_at is not None, "claimable now, not only when the lease would have ended"
    assert bool(notes(jobs.folder, "cancelled")) == (kind == "gated")
    assert not notes(jobs.folder, "end")
    assert "1 handed back" in worker.log


@pytest.mark.req("D19")
def test_at_the_deadline_what_still_runs_is_cancelled_and_handed_back(jobs: Jobs, start: Start) -> None:
    worker = start("-c", 1, "--lease", 60, "--shutdown", 0.3).started()
    ref = jobs.gated.enqueue(Gate("never"))
    wait_for(lambda: notes(jobs.folder, "start"))
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0
    assert 0.25 <= time.monotonic() - began < 6
    found = record(jobs.queue, ref.id)
    assert (found.state, found.attempt, found.error_kind) == ("pending", 0, "released")
    assert notes(jobs.folder, "cancelled")


@pytest.mark.req("D12")
def test_a_kill_leaves_the_job_to_its_lease(jobs: Jobs, start: Start) -> None:
    worker = start("-c", 1, "--lease", 60).started()
    ref = jobs.gated.enqueue(Gate("never"))
    wait_for(lambda: notes(jobs.folder, "start"))
    worker.kill()
    found = record(jobs.queue, ref.id)
    assert (found.state, found.attempt) == ("running", 1)
    assert found.lease_until is not None


@pytest.mark.req("D19")
def test_a_signal_before_there_is_anything_to_stop(jobs: Jobs, start: Start) -> None:
    worker = start("-c", 1, "--lease", 60).started()
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0


@pytest.fixture
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graces of an end are short: these tests wait for all of them."""
    monkeypatch.setattr(stopping, "FLAG_GRACE", 0.1)
    monkeypatch.setattr(stopping, "HAND_BACK_PATIENCE", 0.4)


def deaf_job(queue: DBQueue) -> tuple[Target[None], threading.Event, threading.Event]:
    """A job that does not look at its flag: set when it has begun, and what it waits for."""
    started, go = threading.Event(), threading.Event()

    @queue.job(max_attempts=1, timeout=20)
    def deaf() -> None:
        started.set()
        go.wait(10)

    return deaf, started, go


# -- in a thread, where the database can be made to fail at the right moment -------------------------------------------


@pytest.mark.req("D19")
def test_a_job_that_finishes_in_spite_of_its_flag_has_succeeded(queue: DBQueue) -> None:
    """It never looked, so nothing stopped it half-way."""
    deaf, started, go = deaf_job(queue)
    ref = deaf.enqueue()
    with in_thread(queue, slots=1, shutdown=0.0) as running:
        assert started.wait(5)
        running.stop()
        wait_for(lambda: running.worker.stopping.flagged)
        go.set()
        assert running.ended() == 0
    assert record(queue, ref.id).state == "succeeded"


@pytest.mark.req("D19")
@pytest.mark.usefixtures("quick_end")
def test_at_the_deadline_a_job_that_ignores_its_flag_is_handed_back_too(queue: DBQueue) -> None:
    deaf, started, go = deaf_job(queue)
    ref = deaf.enqueue()
    with in_thread(queue, slots=1, shutdown=0.1) as running:
        assert started.wait(5)
        running.stop()
        assert running.ended() == 0
        found = record(queue, ref.id)
        go.set()
    assert (found.state, found.attempt, found.error_kind) == ("pending", 0, "released")


@pytest.mark.req("D19")
def test_a_failure_after_the_flag_was_seen_is_not_the_jobs(queue: DBQueue) -> None:
    """It raises because it was told to stop: handed back, not failed. But what it says of its own accord counts."""
    started = threading.Barrier(3)

    @queue.job(max_attempts=1, timeout=20)
    def stopping() -> None:
        job = current_job()
        assert job is not None
        started.wait(5)
        if job.wait(10):
            raise RuntimeError("told to stop")

    @queue.job(max_attempts=1, timeout=20)
    def failing() -> None:
        started.wait(5)
        threading.Event().wait(0.02)
        raise RuntimeError("of its own")

    stopped, failed = stopping.enqueue().id, failing.enqueue().id
    with in_thread(queue, slots=2, shutdown=0.3) as running:
        started.wait(5)
        running.stop()
        assert running.ended() == 0
    found = record(queue, stopped)
    assert (found.state, found.attempt) == ("pending", 0)
    assert record(queue, failed).state == "dead"


@pytest.mark.req("D14", "D19")
def test_a_timeout_during_the_drain_counts(queue: DBQueue) -> None:
    started = threading.Event()

    @queue.job(max_attempts=1, timeout=0.3)
    def slow() -> None:
        job = current_job()
        assert job is not None
        started.set()
        job.wait(10)

    ref = slow.enqueue()
    with in_thread(queue, slots=1, lease=2, shutdown=20) as running:
        assert started.wait(5)
        running.stop()
        assert running.ended() == 0
    found = record(queue, ref.id)
    assert (found.state, found.error_kind) == ("dead", "timeout")


@pytest.mark.req("D19")
@pytest.mark.usefixtures("quick_end")
@pytest.mark.parametrize("ended", [True, False], ids=["outcome unsettled", "still running"])
def test_a_database_that_answers_busy_for_ever_does_not_hold_up_the_end(
    queue: DBQueue, told: Told, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Somebody holds SQLite's write lock, or PostgreSQL ends every transaction as a deadlock: the job is left to its
    lease."""
    started, go = threading.Event(), threading.Event()

    @queue.job(max_attempts=2, timeout=20)
    def job() -> None:
        started.set()
        go.wait(10)

    def busy(session: Any, turn: Any) -> Any:
        raise DatabaseBusy("busy")

    ref = job.enqueue()
    with in_thread(queue, slots=1, shutdown=0.2) as running:
        assert started.wait(5)
        monkeypatch.setattr(queue.database.dialect, "turn", busy)
        if ended:
            go.set()
        began = time.monotonic()
        running.stop()
        assert running.ended() == 0
        assert time.monotonic() - began < 4
    go.set()
    monkeypatch.undo()
    assert told.of(events.WorkerStopped)[0].left == 1
    found = record(queue, ref.id)
    assert (found.state, found.attempt) == ("running", 1)


@pytest.mark.req("D19")
@pytest.mark.usefixtures("quick_end")
@pytest.mark.databases("postgres")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_is_gone_does_not_hold_up_the_end(
    queue: DBQueue, told: Told, postgres: Server, when: str
) -> None:
    started, go = threading.Event(), threading.Event()

    @queue.job(max_attempts=2, timeout=20)
    def job() -> None:
        started.set()
        go.wait(10)

    ref = job.enqueue()
    with in_thread(queue, slots=1, shutdown=0.2) as running:
        assert started.wait(5)
        if when == "before":
            postgres.stop()
            told.wait(events.DatabaseTrouble)
        running.stop()
        if when == "after":
            wait_for(lambda: running.worker.stopping.flagged)
            postgres.stop()
        began = time.monotonic()
        assert running.ended() == 0
        assert time.monotonic() - began < 4
    go.set()
    assert [event.left for event in told.of(events.WorkerStopped)] == [1]
    postgres.start()
    assert record(queue, ref.id).state == "running"


@pytest.mark.req("D19")
@pytest.mark.databases("postgres")
def test_an_idle_worker_ends_at_once_while_the_server_is_gone(queue: DBQueue, told: Told, postgres: Server) -> None:
    @queue.job(max_attempts=2, timeout=20)
    def job() -> None: ...

    with in_thread(queue, slots=1) as running:
        running.asleep()
        postgres.stop()
        told.wait(events.DatabaseTrouble)
        began = time.monotonic()
        running.stop()
        assert running.ended() == 0
        assert time.monotonic() - began < 2
    postgres.start()


@pytest.mark.req("D19")
@pytest.mark.databases("postgres")
def test_outcomes_wait_for_a_server_that_comes_back_during_the_drain(
    queue: DBQueue, told: Told, postgres: Server
) -> None:
    started, go = threading.Event(), threading.Event()

    @queue.job(max_attempts=2, timeout=20)
    def job() -> None:
        started.set()
        go.wait(10)

    ref = job.enqueue()
    with in_thread(queue, slots=1, shutdown=20) as running:
        assert started.wait(5)
        postgres.stop()
        told.wait(events.DatabaseTrouble)
        running.stop()
        go.set()
        wait_for(lambda: running.worker.slots.idle == 1)
        postgres.start()
        assert running.ended() == 0
    found = wait_state(queue, ref.id, "succeeded")
    assert found.attempt == 1
    assert [event.left for event in told.of(events.WorkerStopped)] == [0]


def test_two_workers_of_one_name_do_not_take_each_other_for_themselves(queue: DBQueue, told: Told) -> None:
    """Replicas often share a name; after a reconnect a worker hands back rows of its own name that it does not know."""
    go = threading.Event()

    @queue.job(max_attempts=2, timeout=20)
    def job() -> None:
        go.wait(10)

    with in_thread(queue, slots=1, name="replica") as first, in_thread(queue, slots=1, name="replica") as second:
        refs = [job.enqueue().id for _ in range(2)]
        told.wait(events.JobStarted, 2)
        for running in (first, second):
            running.cut()
        told.wait(events.DatabaseBack, 2)
        go.set()
        for ref in refs:
            assert wait_state(queue, ref, "succeeded").attempt == 1
    assert len(told.of(events.JobStarted)) == 2
    assert all(event.released == 0 for event in told.of(events.DatabaseBack))
