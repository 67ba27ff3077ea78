"""Which jobs a worker takes, how many, and when it ends of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dbqueue import ConfigError, DBQueue, events
from dbqueue.database.tables import Turn, TurnResult
from dbqueue.runtime.worker import Worker, WorkerOptions
from dbqueue.targets import Target
from tests.runtimes.lab import Process, RunningWorker, Told, drained, in_thread, record, wait_all, wait_state
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]


@dataclass(frozen=True)
class Number:
    n: int


def _steps(running: RunningWorker, seconds: float) -> int:
    """How often the loop goes round in that time."""
    step, count = running.worker.step, [0]

    def counted() -> float:
        count[0] += 1
        return step()

    running.worker.step = counted  # type: ignore[method-assign]
    running.worker.wake.ring()
    threading.Event().wait(seconds)
    running.worker.step = step  # type: ignore[method-assign]
    return count[0]


# -- only for idle slots -----------------------------------------------------------------------------------------------


@pytest.mark.req("D11")
def test_no_job_waits_in_memory(queue: DBQueue, told: Told) -> None:
    turns = [threading.Event() for _ in range(10)]
    started: list[int] = []

    @queue.job(max_attempts=1, timeout=20)
    def held(number: Number) -> None:
        started.append(number.n)
        turns[number.n].wait(15)

    for n in range(10):
        held.enqueue(Number(n))
    with in_thread(queue, slots=2) as running:
        for n in range(10):
            wait_for(lambda n=n: len(started) >= min(n + 2, 10))  # type: ignore[misc]
            # The row of the job before may still be on its way out.
            busy = min(2, 10 - n)
            counts = wait_all(queue, lambda counts: counts.get("running", 0) == busy)  # noqa: B023
            assert counts.get("pending", 0) == max(0, 8 - n)
            assert _steps(running, 0.02) < 20
            turns[n].set()
        wait_all(queue, lambda counts: counts == {"succeeded": 10})
    assert started == list(range(10))


class Distant:
    """A database whose turns take ``seconds``, and what each of them settled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queue: DBQueue, seconds: float) -> None:
        self.settled: list[int] = []
        turn = queue.database.dialect.turn

        def slow(session: Any, asked: Turn) -> TurnResult:
            threading.Event().wait(seconds)
            if asked.settlements:
                self.settled.append(len(asked.settlements))
            return turn(session, asked)

        monkeypatch.setattr(queue.database.dialect, "turn", slow)


@pytest.mark.req("D11")
def test_short_jobs_share_a_turn_and_wait_for_no_long_one(queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn would settle the one job that ended first, while the other one ends behind it."""
    go = threading.Event()
    turns = Distant(monkeypatch, queue, 0.02)

    @queue.job(max_attempts=1, timeout=20)
    def job(number: Number) -> None:
        if number.n == 0:
            assert go.wait(15)
        elif number.n % 2:
            threading.Event().wait(0.001)

    for n in range(81):
        job.enqueue(Number(n))
    with in_thread(queue, slots=3):
        wait_all(queue, lambda counts: counts == {"succeeded": 80, "running": 1})
        go.set()
        wait_all(queue, lambda counts: counts == {"succeeded": 81})
    assert sum(turns.settled) == 81
    assert len(turns.settled) < 65, turns.settled


@pytest.mark.req("D11")
def test_jobs_that_are_not_short_wait_for_nobody(queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    lingered: list[bool] = []
    Distant(monkeypatch, queue, 0.02)

    @queue.job(max_attempts=1, timeout=20)
    def job(number: Number) -> None:
        threading.Event().wait(0.007 + 0.001 * (number.n % 2))

    for n in range(24):
        job.enqueue(Number(n))
    with in_thread(queue, slots=2) as running:
        lingers = running.worker._lingers
        monkeypatch.setattr(running.worker, "_lingers", lambda now: lingered.append(lingers(now)) or lingered[-1])
        wait_all(queue, lambda counts: counts == {"succeeded": 24})
    assert lingered
    assert not any(lingered)


@pytest.mark.req("D3", "D11")
def test_better_priorities_first_and_older_jobs_first(queue: DBQueue) -> None:
    order: list[int] = []

    @queue.job(max_attempts=1, timeout=5)
    def ranked(number: Number) -> None:
        order.append(number.n)

    for n, priority in enumerate([0, 5, 9, 5, 0, 9, 3]):
        ranked.enqueue(Number(n), priority=priority)
    drained(queue, slots=1)
    assert order == [2, 5, 1, 3, 6, 0, 4]


@pytest.mark.req("D11")
@pytest.mark.parametrize("slots", [1, 2])
def test_queues_take_turns(queue: DBQueue, slots: int) -> None:
    """Also when each claim fills two slots; and a queue that was not asked for is left alone."""
    order: list[str] = []
    both = threading.Barrier(slots)

    def declare(name: str) -> Target[None]:
        @queue.job(max_attempts=1, timeout=10, queue=name, name=name)
        def job() -> None:
            both.wait(5)
            order.append(name)
            threading.Event().wait(0.03)  # on PostgreSQL a claim may look at known lanes only, for 20 ms or so

        return job

    for name in ("mail", "images", "other"):
        target = declare(name)
        for _ in range(6):
            target.enqueue()
    drained(queue, slots=slots, queues=("mail", "images"))
    assert sorted(order) == ["images"] * 6 + ["mail"] * 6
    assert {"mail", "images"} == set(order[:6]) == set(order[6:])
    assert queue.counts("other")["pending"] == 6


@pytest.mark.req("D11")
def test_the_order_of_the_queues_decides_who_is_first(queue: DBQueue) -> None:
    order: list[str] = []

    def declare(name: str) -> None:
        @queue.job(max_attempts=1, timeout=10, queue=name, name=name)
        def job() -> None:
            order.append(name)

    for name in ("a", "b", "c"):
        declare(name)
        queue.targets[name].enqueue()
    drained(queue, slots=1, queues=("c", "a", "b"))
    assert order == ["c", "a", "b"]


# -- D18 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.req("D18")
def test_on_sqlite_the_lease_exceeds_every_timeout(queue: DBQueue, database: str, told: Told) -> None:
    @queue.job(max_attempts=1, timeout=30)
    def half_a_minute() -> None: ...

    Worker(queue, WorkerOptions(lease=30.001)).wake.close()
    if database == "sqlite":
        with pytest.raises(ConfigError, match=r"half_a_minute' \(30000 ms\)"):
            Worker(queue, WorkerOptions(lease=30))
    else:
        Worker(queue, WorkerOptions(lease=0.1)).wake.close()
    assert not told, "nothing was started"


@pytest.mark.req("D17", "D18")
@pytest.mark.databases("sqlite")
def test_the_command_says_so_and_ends(start: Callable[..., Process]) -> None:
    worker = start("--lease", 1)
    assert worker.ended() == 2
    assert "'deaf' (30000 ms)" in worker.log
    assert worker.log.count("\n") == 1


@pytest.mark.req("D18")
def test_handlers_that_enqueue_do_not_starve_when_all_slots_are_busy(make_queue: MakeQueue) -> None:
    """Four at the same moment, each in a transaction of its own, beside the loop: the pool holds one more than there
    are slots."""
    queue = make_queue(workers=1)
    together = threading.Barrier(4)

    @queue.job(max_attempts=1, timeout=20)
    def child() -> None: ...

    @queue.job(max_attempts=1, timeout=20)
    def parent() -> None:
        together.wait(10)
        with queue.database.session():
            together.wait(10)  # four connections are in use at this moment
        child.enqueue()

    for _ in range(4):
        parent.enqueue()
    began = time.monotonic()
    with in_thread(queue, slots=4):
        wait_all(queue, lambda counts: counts == {"succeeded": 8})
    assert time.monotonic() - began < 8


# -- once, max_jobs ----------------------------------------------------------------------------------------------------


def test_once_runs_everything_that_is_due_and_nothing_else(queue: DBQueue, told: Told) -> None:
    @queue.job(max_attempts=2, timeout=5, retry=60)
    def child(number: Number) -> None:
        if number.n == 0:
            raise ValueError

    @queue.job(max_attempts=1, timeout=5)
    def parent(number: Number) -> None:
        child.enqueue(Number(number.n), priority=number.n % 10)

    for n in range(25):
        parent.enqueue(Number(n), priority=n % 10)
    later = child.enqueue(Number(1), delay=60).id
    assert drained(queue, slots=3) == 0
    counts = {state: n for state, n in queue.counts().items() if n}
    assert counts == {"succeeded": 49, "pending": 2}, "the retry and the one of the next minute wait"
    assert record(queue, later).attempt == 0
    assert drained(queue) == 0
    assert len(told.of(events.JobStarted)) == 50


def test_once_takes_up_what_has_just_become_due(queue: DBQueue) -> None:
    @queue.job(max_attempts=1, timeout=5)
    def soon() -> None: ...

    ref = soon.enqueue(delay=0.02)
    wait_for(lambda: not queue.database.read(_waiting(queue)))
    drained(queue)
    assert record(queue, ref.id).state == "succeeded"


def _waiting(queue: DBQueue) -> Callable[[Any], bool]:
    dialect = queue.database.dialect

    def waiting(session: Any) -> bool:
        now = dialect.now(session)
        return bool(session.execute(f"SELECT 1 FROM {dialect.names.qualified('jobs')} WHERE run_at > {now}"))

    return waiting


def test_max_jobs_ends_the_worker_without_a_busy_loop(queue: DBQueue) -> None:
    go = threading.Event()

    @queue.job(max_attempts=1, timeout=20)
    def held() -> None:
        go.wait(15)

    for _ in range(5):
        held.enqueue()
    with in_thread(queue, slots=4, max_jobs=3) as running:
        wait_all(queue, lambda counts: counts.get("running") == 3)
        assert _steps(running, 0.5) < 30, "an idle slot that may not claim has nothing to do"
        go.set()
        assert running.ended() == 0
    assert {state: n for state, n in queue.counts().items() if n} == {"succeeded": 3, "pending": 2}


# -- looking only beyond the marks -------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
def test_a_worker_does_not_fall_asleep_on_a_claim_that_looked_only_beyond_its_marks(
    make_queue: MakeQueue, told: Told
) -> None:
    """A better priority than ever seen has no mark yet, so only a claim that looks everywhere finds its job."""
    queue = make_queue(poll=20)
    released = threading.Event()

    @queue.job(max_attempts=1, timeout=20)
    def job() -> None:
        released.wait(10)

    with in_thread(queue, slots=1) as running:
        job.enqueue(priority=3)
        told.wait(events.JobStarted)
        urgent = job.enqueue(priority=9)
        marks = running.worker.connection.session.marks  # type: ignore[union-attr]
        marks._next["claim"] = time.monotonic() + 0.3  # as if looking everywhere were that expensive just now
        marks._cost["claim"] = 1.0
        began = time.monotonic()
        released.set()
        wait_state(queue, urgent.id, "succeeded")
        assert time.monotonic() - began < 3
