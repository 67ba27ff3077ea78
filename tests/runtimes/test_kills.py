"""Workers that die without a word: what they held is done by others, costs an attempt each time, and never takes the
rest down."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime

import pytest

from dbqueue import DBQueue, IllegalMove
from tests.runtimes.jobs import Jobs, Nap, notes
from tests.runtimes.lab import Process, record, wait_state
from tests.waiting import wait_for

WORKERS, SEED = 3, 20_240_229


def _holds(queue: DBQueue, worker: Process) -> bool:
    """Whether this process has a claim, by the name in the row."""
    running = f"SELECT worker FROM {queue.database.dialect.names.qualified('jobs')} WHERE state = 1"
    rows = queue.database.read(lambda session: session.execute(running))
    return any(f":{worker.popen.pid}:" in str(row[0]) for row in rows)


@pytest.mark.req("D12", "D13", "D14")
@pytest.mark.databases("postgres")
@pytest.mark.timeout(90)
def test_fifteen_killed_workers_lose_nothing(jobs: Jobs, start: Callable[..., Process]) -> None:
    _kill(jobs, start, 400, 15)


@pytest.mark.req("D12", "D13", "D14")
@pytest.mark.databases("sqlite")
@pytest.mark.timeout(90)
def test_six_killed_workers_lose_nothing(jobs: Jobs, start: Callable[..., Process]) -> None:
    _kill(jobs, start, 200, 6)


@pytest.mark.soak
@pytest.mark.req("D12", "D13", "D14")
@pytest.mark.timeout(300)
def test_fifty_killed_workers_lose_nothing(jobs: Jobs, start: Callable[..., Process]) -> None:
    _kill(jobs, start, 1_500, 50)


def _kill(jobs: Jobs, start: Callable[..., Process], count: int, kills: int) -> None:
    """Workers die in the middle of their jobs, and are started again, while the jobs are being done."""
    chance = random.Random(SEED)
    queue = jobs.queue
    workers = [start("-c", 2, "--lease", 1, "-l", "warning", free=True) for _ in range(WORKERS)]
    refs = [ref.id for ref in jobs.quick.enqueue_many([Nap(0.1)] * count)]
    wait_for(lambda: len({line.pid for line in notes(jobs.folder)}) == WORKERS, 20)
    for _ in range(kills):
        unlucky = workers.pop(chance.randrange(2))  # one of those that are up for longest
        wait_for(lambda: _holds(queue, unlucky), 20, "the worker got no job")  # noqa: B023
        unlucky.kill()
        workers.append(start("-c", 2, "--lease", 1, "-l", "warning", free=True))
    unfinished = f"SELECT 1 FROM {queue.database.dialect.names.qualified('jobs')} LIMIT 1"
    wait_for(lambda: not queue.database.read(lambda session: session.execute(unfinished)), 40)
    counts = {state: n for state, n in queue.counts().items() if n}
    assert sum(counts.values()) == count, "none is lost, none is there twice"
    assert counts.keys() <= {"succeeded", "dead"}

    starts: dict[str, list[int]] = defaultdict(list)
    for line in notes(jobs.folder, "start"):
        starts[line.job].append(line.attempt)
    lost_claims = never_started = 0
    ends = Counter(line.job for line in notes(jobs.folder, "end"))
    records = {found.id: found for found in queue.jobs(limit=count)}
    for ref in refs:
        found = records[ref]
        lost_claims += found.lapses
        if found.state == "dead":
            assert (found.attempt, found.error_kind) == (20, "crashed")
            assert found.lapses == found.attempt
        else:  # every attempt but the last one ended with its worker
            assert found.lapses == found.attempt - 1
            assert starts[str(ref)][-1] == found.attempt, "the attempt that counts was the last one to start"
            assert ends[str(ref)] >= 1
        attempts = starts[str(ref)]
        assert attempts == sorted(set(attempts)), "each attempt is started once, one after the other"
        never_started += found.attempt - len(attempts)
    assert kills <= lost_claims <= kills * 2, "a kill costs an attempt of what was held, and nothing else"
    assert 0 <= never_started <= lost_claims


@pytest.mark.req("D9", "D12")
@pytest.mark.req("D8")
def test_a_job_that_kills_its_process_every_time_ends_and_the_others_go_on(
    jobs: Jobs, start: Callable[..., Process]
) -> None:
    queue = jobs.queue
    killer = jobs.killer.enqueue(priority=9).id
    unknown = jobs.killer_unknown.enqueue(key="once", priority=9).id
    fails = jobs.killer_fail.enqueue(priority=9).id
    others = [jobs.quick.enqueue(Nap(), priority=n % 2).id for n in range(20)]

    workers = [start("-c", 1, "--lease", 1, free=True) for _ in range(2)]
    started, deadline = 2, time.monotonic() + 40

    def done() -> bool:
        """Looks after the processes, as a supervisor does."""
        nonlocal started
        for n, worker in enumerate(workers):
            if worker.popen.poll() is not None:
                workers[n] = start("-c", 1, "--lease", 1, free=True)
                started += 1
        counts = queue.counts()
        return not counts.get("pending") and not counts.get("running")

    wait_for(done, deadline - time.monotonic())
    for job in others:
        assert record(queue, job).state == "succeeded"
    found = record(queue, killer)
    assert (found.state, found.error_kind, found.attempt, found.lapses) == ("dead", "crashed", 3, 3)
    found = record(queue, fails)
    assert (found.state, found.error_kind, found.attempt) == ("dead", "crashed", 1)
    found = record(queue, unknown)
    assert (found.state, found.error_kind, found.attempt) == ("unknown", "crashed", 1)
    starts = Counter(line.job for line in notes(jobs.folder, "start") if line.job in map(str, (killer, unknown, fails)))
    assert starts == {str(killer): 3, str(unknown): 1, str(fails): 1}
    assert started <= 2 + 5, "five crashes"

    # Held until somebody decides: its key stays taken, it is not run again by itself or by a retry, and a stale look
    # decides nothing.
    assert jobs.killer_unknown.enqueue(key="once").duplicate
    with pytest.raises(IllegalMove):
        queue.retry(unknown)
    updated: datetime = record(queue, unknown).updated_at
    assert queue.resolve(unknown, "succeeded", updated) == "unknown"
    assert wait_state(queue, unknown, "succeeded").attempt == 1
