"""Leases are renewed while the jobs run: with every slot busy, through the drain, and beside other people's locks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dbqueue import DBQueue, current_job, events
from dbqueue.database.tables import Fact, Turn, TurnResult
from tests.runtimes.jobs import Jobs, Nap, notes
from tests.runtimes.lab import Process, Told, in_thread, record, wait_state
from tests.waiting import wait_for


@pytest.mark.req("D14", "D13", "D19")
def test_long_jobs_run_once_while_all_slots_are_busy_and_through_the_drain(
    jobs: Jobs, start: Callable[..., Process]
) -> None:
    """Jobs much longer than the lease fill two workers; one of them is told to stop in the middle, and a third
    one, idle, waits for any lease to end."""
    queue = jobs.queue
    workers = [start("-c", 2, "--lease", 1, free=True).started() for _ in range(2)]
    refs = [jobs.long.enqueue(Nap(2.6)).id for _ in range(4)]
    wait_for(lambda: len(notes(jobs.folder, "start")) == 4)
    assert len({line.pid for line in notes(jobs.folder)}) == 2
    vulture = start("-c", 4, "--lease", 1, free=True).started()
    workers[0].signal(signal.SIGTERM)
    for ref in refs:
        found = wait_state(queue, ref, "succeeded")
        assert (found.attempt, found.lapses) == (1, 0)
    assert workers[0].ended() == 0
    assert len(notes(jobs.folder, "start")) == len(notes(jobs.folder, "end")) == 4
    assert vulture.popen.pid not in {line.pid for line in notes(jobs.folder)}


@pytest.mark.req("D14")
def test_a_renewal_waits_for_a_lock_that_is_freed_before_the_lease_ends(
    make_queue: Callable[..., DBQueue], told: Told, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite: somebody's transaction holds the write lock. PostgreSQL: somebody's transaction holds the job's row."""
    queue = make_queue(lease=2.4, poll=0.05)
    renewed: list[float] = []
    turn = queue.database.dialect.turn

    def watched(session: Any, asked: Turn) -> TurnResult:
        result = turn(session, asked)
        if Fact.RENEWED in result.renewed:
            renewed.append(time.monotonic())
        return result

    monkeypatch.setattr(queue.database.dialect, "turn", watched)
    go = threading.Event()

    @queue.job(max_attempts=2, timeout=2.3)
    def job() -> None:
        go.wait(2.2)

    ref = job.enqueue()
    with in_thread(queue, slots=1), in_thread(queue, slots=1):
        told.wait(events.JobStarted)
        began = time.monotonic()
        with queue.database.transaction() as holder:  # from the start to beyond the moment of the first renewal
            if database != "sqlite":
                holder.execute(f"SELECT 1 FROM {queue.database.dialect.names.qualified('jobs')} FOR UPDATE")
            threading.Event().wait(1.3)
        wait_for(lambda: renewed)
        # The new lease counts from the renewal, not from when it was first tried.
        lease_until = record(queue, ref.id).lease_until
        assert lease_until is not None
        now = queue.database.read(queue.database.dialect.now) / 1e6
        assert lease_until.timestamp() - now > 2.4 - (time.monotonic() - began - 1.3) - 0.6
        go.set()
        assert wait_state(queue, ref.id, "succeeded").attempt == 1
    assert len(told.of(events.JobStarted)) == 1
    assert not told.of(events.ClaimLost)


@pytest.mark.req("D14")
def test_a_finished_job_keeps_its_lease_until_it_is_settled(
    make_queue: Callable[..., DBQueue], told: Told, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outcome is refused as busy for two leases; nobody else gets the job meanwhile."""
    queue = make_queue(lease=0.9, poll=0.05)
    dialect = queue.database.dialect
    turn, settle = dialect.turn, threading.Event()

    def busy(session: Any, asked: Turn) -> TurnResult:
        if settle.is_set() or not asked.settlements:
            return turn(session, asked)
        count = len(asked.settlements)
        asked.settlements = []
        result = turn(session, asked)
        result.settled = [Fact.BUSY] * count
        return result

    monkeypatch.setattr(dialect, "turn", busy)

    @queue.job(max_attempts=2, timeout=0.8)
    def job() -> None: ...

    ref = job.enqueue()
    with in_thread(queue, slots=1), in_thread(queue, slots=1):
        told.wait(events.JobStarted)
        threading.Event().wait(2.0)
        assert record(queue, ref.id).state == "running"
        settle.set()
        assert wait_state(queue, ref.id, "succeeded").attempt == 1
    assert len(told.of(events.JobStarted)) == 1


@pytest.mark.req("D13")
def test_a_claim_that_was_lost_flags_the_handler_and_drops_its_result(queue: DBQueue, told: Told) -> None:
    """Cancelled by hand: the worker learns of it when it renews, tells the handler, and has its slot back at once."""
    seen = threading.Event()

    @queue.job(max_attempts=2, timeout=0.8)
    def job() -> None:
        running = current_job()
        assert running is not None
        if running.wait(0.75):
            seen.set()

    ref = job.enqueue()
    with in_thread(queue, slots=1, lease=0.9) as running:
        told.wait(events.JobStarted)
        assert queue.cancel(ref.id) == "running"
        assert seen.wait(2)
        told.wait(events.ClaimLost)
        assert running.worker.slots.idle == 1
        assert not told.of(events.JobEnded)
    assert record(queue, ref.id).state == "cancelled"


@pytest.mark.req("D13")
def test_a_job_claimed_again_by_the_same_worker_while_its_first_run_goes_on(
    queue: DBQueue, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker slept over its lease (a suspended machine). Its own sweep gives the job back, and it claims it anew:
    two runs of one job in one worker, and only the second one's result counts. The first one keeps its slot, and is
    watched until it ends."""
    first, second = threading.Event(), threading.Event()
    attempts: list[int] = []

    @queue.job(max_attempts=3, timeout=0.7)
    def job() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            first.wait(10)
        else:
            second.wait(10)

    ref = job.enqueue()
    with in_thread(queue, slots=2, lease=0.8) as running:
        told.wait(events.JobStarted)
        claim = next(iter(running.worker.claims._running.values()))
        claim.deadline += 60
        queue.database.clock.advance(3600)
        told.wait(events.JobStarted, 2)
        assert [event.attempt for event in told.of(events.JobStarted)] == [1, 2]
        assert running.worker.slots.idle == 0
        first.set()
        told.wait(events.ClaimLost)
        assert record(queue, ref.id).state == "running"
        second.set()
        assert wait_state(queue, ref.id, "succeeded").attempt == 2
        wait_for(lambda: running.worker.slots.idle == 2)
