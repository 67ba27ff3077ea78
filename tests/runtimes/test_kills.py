"""Workers that die without a word: what they held is done by others, costs an attempt each time, and never takes the
rest down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime

import pytest

from dbqueue import DBQueue, IllegalMove
from dbqueue.states import OnCrash, State
from tests.factory import make, now, rows
from tests.runtimes.jobs import Jobs, Nap, notes
from tests.runtimes.lab import Process, record, wait_state
from tests.waiting import wait_for


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


@pytest.mark.req("D8", "D12", "D13")
@pytest.mark.parametrize(("on_crash", "state"), [(OnCrash.RETRY, State.PENDING), (OnCrash.UNKNOWN, State.UNKNOWN)])
def test_a_claim_whose_lease_ended_is_not_handed_back(queue: DBQueue, on_crash: OnCrash, state: State) -> None:
    """A worker forgets a claim when the database calls it lost, however far its job had come. After a reconnect that row still
    bears its name: giving the attempt back would make a run that happened one that never was."""
    database = queue.database
    job = make(database, State.RUNNING, worker="me", lease_until=now(database) - 1, on_crash=int(on_crash))
    before = rows(database)
    with database.session() as session:
        assert database.dialect.release_unknown(session, "me", []) == 0
        assert rows(database) == before
        database.dialect.upkeep(session, 10, ("default",))
    row = rows(database).jobs[job.id]
    assert (row["state"], row["attempt"], row["lapses"]) == (state, 1, 1)
