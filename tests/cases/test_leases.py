"""Whose job is it, and until when? Only the lease in its row says so."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from dbqueue import DBQueue, events, ids
from dbqueue.database.tables import ClaimRequest, Turn
from tests.factory import set_columns
from tests.runtimes.jobs import Gate, Jobs, Nap, notes, open_gate
from tests.runtimes.lab import Process, Told, in_thread, record, wait_state
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]
Start = Callable[..., Process]


def claimed_by_the_dead(queue: DBQueue, lease: float) -> None:
    """A worker claims one job as workers do, and is never heard of again."""
    claim = ClaimRequest(("default",), 1, "dead", ids.new_token(), round(lease * 1e6))
    with queue.database.session() as session:
        assert len(queue.database.dialect.turn(session, Turn(claim=claim)).claimed) == 1


@pytest.mark.req("D12", "D14")
def test_a_far_eta_needs_no_long_lease(jobs: Jobs, start: Start) -> None:
    """C01, C05. Celery on Redis: a task whose ETA lies beyond the visibility timeout is handed out again before it is due, and
    people who raise the timeout to days wait for days when its holder is killed."""
    worker = start("-c", 2, "--lease", 0.3, free=True).started()
    began = time.monotonic()
    job = jobs.quick.enqueue(Nap(), delay=0.8).id
    worker.kill()
    found = record(jobs.queue, job)
    assert (found.state, found.worker) == ("pending", None), "nobody holds what is not due"
    with in_thread(jobs.queue, slots=1, lease=60):
        found = wait_state(jobs.queue, job, "succeeded")
    assert (found.attempt, found.lapses) == (1, 0)
    (line,) = notes(jobs.folder, "start")
    assert line.at - began >= 0.795


@pytest.mark.req("D12", "D13")
def test_a_lease_lasts_as_long_as_its_own_claim_said(make_queue: MakeQueue, told: Told) -> None:
    """C04. Celery on Redis: a process that kept the short default timeout takes back what another one holds for longer."""
    queue = make_queue(lease=2, poll=0.05)
    ran: list[int] = []

    @queue.job(max_attempts=3, timeout=1.5)
    def job() -> None:
        ran.append(1)

    held, lost = job.enqueue(priority=9).id, job.enqueue(priority=5).id
    claimed_by_the_dead(queue, 60)
    claimed_by_the_dead(queue, 0.3)
    with in_thread(queue, slots=2):
        assert wait_state(queue, lost, "succeeded").attempt == 2, "the short lease had ended"
        found = record(queue, held)
        assert (found.state, found.attempt, found.lapses) == ("running", 1, 0)
        queue.database.clock.advance(59)
        again = job.enqueue().id
        wait_state(queue, again, "succeeded")
        assert record(queue, held).state == "running"
        queue.database.clock.advance(2)
        found = wait_state(queue, held, "succeeded")
        assert (found.attempt, found.lapses) == (2, 1)
    assert len(ran) == 3


@pytest.mark.req("D12")
def test_a_dead_workers_job_comes_back_though_nobody_remembers_the_worker(make_queue: MakeQueue) -> None:
    """C19. Procrastinate: housekeeping removed the dead worker's row first, and the search for stalled jobs joined on it."""
    queue = make_queue(lease=2, poll=0.05)

    @queue.job(max_attempts=3, timeout=1.5)
    def job() -> None: ...

    ref = job.enqueue()
    claimed_by_the_dead(queue, 0.3)
    queue.purge(["succeeded", "acked", "dead", "cancelled", "discarded"])
    set_columns(queue.database, ref.id.bytes, worker=None)
    with in_thread(queue, slots=1):
        found = wait_state(queue, ref.id, "succeeded")
    assert (found.attempt, found.lapses) == (2, 1)


@pytest.mark.req("D12", "D9")
def test_recovery_needs_no_free_slot(make_queue: MakeQueue, told: Told) -> None:
    """C21. Procrastinate: taking back stalled jobs was itself a job, so it was starved when every slot was busy."""
    queue = make_queue(lease=20, poll=0.05)
    go = threading.Event()

    @queue.job(max_attempts=3, timeout=15)
    def job() -> None:
        go.wait(10)

    with in_thread(queue, slots=1):
        busy = job.enqueue().id
        told.wait(events.JobStarted)
        lost = job.enqueue().id
        claimed_by_the_dead(queue, 0.2)
        found = wait_state(queue, lost, "pending")
        assert found.ready_at is not None, "claimable, by a worker that cannot take it itself"
        assert record(queue, busy).state == "running"
        with in_thread(queue, slots=1):
            told.wait(events.JobStarted, 2)
            go.set()
            assert wait_state(queue, lost, "succeeded").attempt == 2
        assert wait_state(queue, busy, "succeeded").attempt == 1


@pytest.mark.req("D12", "D14")
def test_what_a_killed_worker_held_and_what_it_did_not_is_done_by_another(jobs: Jobs, start: Start) -> None:
    """C13, C16. Celery: SIGKILL of a worker lost the running tasks, with late acknowledgement too, and the reserved ones with them."""
    worker = start("-c", 2, "--lease", 0.5, free=True)
    refs = [jobs.deaf.enqueue(Gate("g")).id for _ in range(5)]
    wait_for(lambda: len(notes(jobs.folder, "start")) == 2)
    worker.kill()
    assert not notes(jobs.folder, "end")
    open_gate(jobs.folder, "g")
    with in_thread(jobs.queue, slots=2, lease=60):
        found = [wait_state(jobs.queue, ref, "succeeded") for ref in refs]
    assert [(job.attempt, job.lapses) for job in found] == [(2, 1)] * 2 + [(1, 0)] * 3
    assert len(notes(jobs.folder, "end")) == 5


@pytest.mark.req("D13")
def test_a_worker_that_was_suspended_confirms_nothing(jobs: Jobs, start: Start) -> None:
    """C22. Solid Queue: a worker whose heartbeat lagged was pruned while it finished, and the job ended twice, once each way."""
    stale = start("-c", 1, "--lease", 0.5, free=True)
    job = jobs.deaf.enqueue(Gate("g")).id
    wait_for(lambda: notes(jobs.folder, "start"))
    stale.signal(signal.SIGSTOP)
    holder = start("-c", 1, "--lease", 60)
    wait_for(lambda: len(notes(jobs.folder, "start")) == 2)
    holder.signal(signal.SIGSTOP)
    open_gate(jobs.folder, "g")
    stale.signal(signal.SIGCONT)
    wait_for(lambda: "the claim of attempt 1 was lost" in stale.log, message="the stale worker was not refused")
    assert [line.pid for line in notes(jobs.folder, "start")] == [stale.popen.pid, holder.popen.pid]
    found = record(jobs.queue, job)
    assert (found.state, found.attempt) == ("running", 2)
    holder.signal(signal.SIGCONT)
    found = wait_state(jobs.queue, job, "succeeded")
    assert (found.attempt, found.lapses) == (2, 1)
    assert {state: n for state, n in jobs.queue.counts().items() if n} == {"succeeded": 1}
    assert "succeeded" not in stale.log
