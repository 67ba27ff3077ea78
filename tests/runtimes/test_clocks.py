"""Clocks: a node's own decides nothing, and the database's may jump."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dbqueue import DBQueue
from dbqueue.database.tables import ClaimRequest, Turn
from dbqueue.states import State
from tests.runtimes.jobs import Jobs, Nap, notes
from tests.runtimes.lab import Process, in_thread, record, wait_all, wait_state
from tests.waiting import wait_for

HOURS = 6 * 3600.0


@pytest.mark.req("H14", "D13", "D12")
def test_workers_whose_clocks_are_half_a_day_apart(jobs: Jobs, start: Callable[..., Process]) -> None:
    """One is six hours ahead and one six behind. Nobody takes a live worker's job, and nobody waits longer for a dead
    one's; waiting jobs start when the database says so."""
    queue = jobs.queue
    workers = [start("-c", 2, "--lease", 1, skew=skew, free=True) for skew in (HOURS, -HOURS)]
    for worker in workers:
        worker.started()
    hours = [re.findall(r"T(\d\d):\S+ INFO dbqueue", worker.log)[0] for worker in workers]
    assert hours[0] != hours[1], "their clocks do differ"
    # Four jobs, longer than the lease: both workers are full, and each sees the other's claims all the time.
    long = [jobs.long.enqueue(Nap(1.7)).id for _ in range(4)]
    wait_for(lambda: len(notes(jobs.folder, "start")) == 4)
    assert len({line.pid for line in notes(jobs.folder, "start")}) == 2
    began = time.monotonic()
    later = jobs.quick.enqueue(Nap(), delay=1.0).id
    for job in long:
        found = wait_state(queue, job, "succeeded")
        assert (found.attempt, found.lapses) == (1, 0)
    wait_state(queue, later, "succeeded")
    lag = next(line.at for line in notes(jobs.folder, "start") if line.job == str(later)) - began
    assert 0.99 <= lag < 3
    assert len(notes(jobs.folder, "start")) == 5
    # One of them dies; the other one has the job when the lease has ended, and not before.
    dies = str(jobs.long.enqueue(Nap(0.6)).id)
    first = wait_for(lambda: [line for line in notes(jobs.folder, "start") if line.job == dies])[0]
    next(worker for worker in workers if worker.popen.pid == first.pid).kill()
    again = wait_for(lambda: [line for line in notes(jobs.folder, "start") if line.job == dies][1:])[0]
    assert again.pid != first.pid
    assert 0.5 < again.at - first.at < 3.0
    wait_all(queue, lambda counts: counts == {"succeeded": 6})


@dataclass(frozen=True)
class Number:
    n: int


@pytest.mark.req("H14")
def test_a_database_clock_that_jumps_loses_nothing(make_queue: Callable[..., DBQueue]) -> None:
    """An hour back, then an hour forward again. Jobs that run at a jump forward lose their lease at that moment, so
    they run twice."""
    queue = make_queue(poll=0.05, lease=2.0)
    ran: list[int] = []
    gates = {n: threading.Event() for n in (1_000, 1_001)}

    @queue.job(max_attempts=3, timeout=1.9, retry=0.05)
    def job(number: Number) -> None:
        if number.n in gates:
            gates[number.n].wait(1.5)
        ran.append(number.n)

    def some(first: int) -> list[int]:
        for n in range(first, first + 20):
            job.enqueue(Number(n), delay=0.1 if n % 4 == 0 else None, priority=n % 3)
        wait_for(lambda: {*range(first, first + 20)} <= set(ran), 5, "jobs are stuck")
        return list(range(first, first + 20))

    with in_thread(queue, slots=4):
        expected = some(0)
        held = job.enqueue(Number(1_000)).id
        wait_state(queue, held, "running")
        queue.database.clock.advance(-3600)
        expected += some(100)
        gates[1_000].set()
        assert wait_state(queue, held, "succeeded").attempt == 1
        held = job.enqueue(Number(1_001)).id
        wait_state(queue, held, "running")
        queue.database.clock.advance(3600)
        job.enqueue(Number(1_002))
        wait_for(lambda: 1_002 in ran, 5, "jobs are stuck")  # now no claim of before the jump is on its way
        expected += some(200)
        gates[1_001].set()
        assert wait_state(queue, held, "succeeded").attempt <= 2
        wait_all(queue, lambda counts: counts == {"succeeded": 63})
    assert sorted(n for n in ran if n < 1_000) == expected
    assert ran.count(1_000) == 1


@pytest.mark.req("H14")
def test_a_dead_workers_lease_lasts_as_long_as_the_databases_clock_says(make_queue: Callable[..., DBQueue]) -> None:
    queue = make_queue(poll=0.05)

    @queue.job(max_attempts=3, timeout=5)
    def job() -> None: ...

    ref = job.enqueue()
    dialect = queue.database.dialect
    with queue.database.session() as session:
        claim = ClaimRequest(("default",), 1, "dead", b"t" * 16, 600 * 1_000_000)
        assert len(dialect.turn(session, Turn(claim=claim)).claimed) == 1
    with in_thread(queue, slots=1):
        threading.Event().wait(0.3)
        assert record(queue, ref.id).state == State.RUNNING.label
        queue.database.clock.advance(599)
        threading.Event().wait(0.3)
        assert record(queue, ref.id).state == State.RUNNING.label
        queue.database.clock.advance(1.2)
        found = wait_state(queue, ref.id, "succeeded")
        assert (found.attempt, found.lapses) == (2, 1)
