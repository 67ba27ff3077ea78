"""Tasks in `dbqueue worker`, in processes that cannot import Celery: from the declaration to the last retry, through crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest

from tests.bridge.lab import Lab, outcome
from tests.runtimes.jobs import notes
from tests.runtimes.lab import drained
from tests.waiting import wait_for


@pytest.mark.req("C8")
@pytest.mark.parametrize("pool", ["threads", pytest.param("processes", marks=pytest.mark.soak)])
def test_declared_called_run_and_retried_without_celery(lab: Lab, pool: str) -> None:
    """The calls, too, are made by a process without Celery."""
    calls = """
import tests.bridge.without, tests.bridge.tasks as tasks
tasks.add.delay(3, y=4)
tasks.add.s(y=1).delay(0)
tasks.shared.apply_async(("hello",), priority=9)
print(tasks.climb.delay(3).job_id)
print(tasks.climb.delay(4).job_id)
"""
    said = subprocess.run(
        [sys.executable, "-c", calls], capture_output=True, text=True, check=True, timeout=60,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    reached, failed = (UUID(line) for line in said.stdout.split())
    worker = lab.worker(pool=pool)
    for what, count in (("sum7", 1), ("sum1", 1), ("hello", 1), ("without", 2)):
        lab.noted(what, count)
    assert outcome(lab.ended(reached)) == ("succeeded", None, None), worker.log
    assert outcome(lab.ended(failed)) == ("dead", "failed", "ValueError")
    assert sorted(lab.steps) == sorted(f"step{step}" for step in (0, 1, 2, 3) for _ in range(2))
    assert lab.queue.counts() == {"succeeded": 4, "dead": 1}
    assert "ImportError" not in worker.log


@pytest.mark.req("C8", "D12")
def test_a_worker_killed_in_the_middle_of_a_retry_loses_and_doubles_nothing(lab: Lab) -> None:
    job = lab.tasks.climb.delay(2).job_id
    lab.hold(1)
    worker = lab.worker()
    lab.noted("step1")
    worker.kill()
    lab.let_go(1)
    assert lab.queue.counts() == {"running": 1}, "one row, and it is still the killed worker's"
    lab.queue.database.clock.advance(3600)  # its lease has ended
    drained(lab.queue)
    record = lab.ended(job)
    assert (record.state, record.attempt, record.lapses) == ("succeeded", 4, 1)
    assert lab.steps == ["step0", "step1", "step1", "step2"], "a crash is no retry: the step is made again"
    assert lab.queue.counts() == {"succeeded": 1}


@pytest.mark.soak
@pytest.mark.req("C8", "D12")
def test_a_killed_child_costs_no_retry_and_the_last_crash_ends_the_job(lab: Lab) -> None:
    worker = lab.worker(pool="processes")
    climbing, dying = lab.tasks.climb.delay(2).job_id, lab.tasks.die.delay(2).job_id
    lab.hold(2)
    record = lab.ended(dying)
    assert outcome(record) == ("dead", "crashed", "its process ended: signal 9"), worker.log
    assert [line.what for line in notes(lab.folder) if line.what.startswith("die")] == ["die0", "die1", "die2", "die2"]
    (held,) = lab.noted("step2")
    os.kill(held.pid, signal.SIGKILL)
    lab.noted("step2", 2)
    lab.let_go(2)
    record = lab.ended(climbing)
    assert (record.state, record.attempt) == ("succeeded", 4)
    assert lab.steps == ["step0", "step1", "step2", "step2"]


@pytest.mark.req("C8", "D14")
def test_time_limits_in_process_slots(lab: Lab) -> None:
    """The soft one can be caught; the hard one kills, and a job that met it is not tried again, as with Celery."""
    worker = lab.worker(pool="processes")
    soft, hard = lab.tasks.soft.delay().job_id, lab.tasks.hard.delay().job_id
    assert outcome(lab.ended(soft)) == ("dead", "failed", "SoftTimeLimitExceeded"), worker.log
    assert outcome(lab.ended(hard)) == ("dead", "timeout", None)
    assert [len(notes(lab.folder, what)) for what in ("cleaned", "main", "hard")] == [1, 1, 1]


@pytest.mark.req("C8")
@pytest.mark.databases("sqlite")
def test_a_soft_limit_in_a_thread_is_told_to_be_without_effect(lab: Lab) -> None:
    worker = lab.worker(pool="threads")
    lab.tasks.soft.apply_async(soft_time_limit=0.01, time_limit=10)
    wait_for(lambda: "its soft time limit needs process slots" in worker.log, message=worker.log)
    assert not notes(lab.folder, "cleaned")
