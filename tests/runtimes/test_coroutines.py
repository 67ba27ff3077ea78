"""`async def` handlers in thread slots: tasks of one event loop, which can be cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator

import pytest

from dbqueue import DBQueue, current_job, events, ids
from dbqueue.database.tables import ClaimedRow
from dbqueue.runtime.context import JobContext
from dbqueue.runtime.coroutines import Coroutines
from dbqueue.runtime.execute import Outcome, Work
from dbqueue.states import Kind, State
from dbqueue.targets import Target
from dbqueue.testing import CaseFactory
from tests.runtimes.lab import Told, drained, in_thread, record, wait_state
from tests.waiting import wait_for


@pytest.mark.req("D11")
def test_as_many_as_there_are_slots_run_at_once_in_one_thread(queue: DBQueue) -> None:
    threads, running, most = set[int](), 0, 0
    full = asyncio.Event()

    @queue.job(max_attempts=1, timeout=20)
    async def meeting() -> None:
        nonlocal running, most
        threads.add(threading.get_ident())
        running += 1
        most = max(most, running)
        if running == 50:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)
        running -= 1

    refs = [meeting.enqueue().id for _ in range(60)]
    assert drained(queue, slots=50, lease=60) == 0
    assert {record(queue, job).state for job in refs} == {"succeeded"}
    assert (len(threads), most) == (1, 50)


@pytest.mark.req("D14")
def test_a_timeout_cancels(queue: DBQueue) -> None:
    """Also one that makes something else of its cancellation, or of nothing: the limit holds for all."""
    seen: list[str] = []

    @queue.job(max_attempts=2, timeout=0.2, retry=0.01)
    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("slow")
            raise

    @queue.job(max_attempts=1, timeout=0.2)
    async def stubborn() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("stubborn")

    refs = [slow.enqueue().id, stubborn.enqueue().id]
    with in_thread(queue, slots=2, lease=5):
        found = [wait_state(queue, job, "dead") for job in refs]
    assert [(job.attempt, job.error_kind) for job in found] == [(2, "timeout"), (1, "timeout")]
    assert sorted(seen) == ["slow", "slow", "stubborn"]


@pytest.mark.req("D14")
def test_a_cancelled_one_costs_the_log_one_line(queue: DBQueue, caplog: pytest.LogCaptureFixture) -> None:
    """Where it was waiting is no news. A CancelledError that nobody here asked for is."""

    @queue.job(max_attempts=1, timeout=0.2)
    async def slow() -> None:
        await asyncio.sleep(30)

    @queue.job(max_attempts=1, timeout=5)
    async def odd() -> None:
        raise asyncio.CancelledError

    with in_thread(queue, slots=2, lease=6):
        for job in (slow.enqueue().id, odd.enqueue().id):
            wait_state(queue, job, "dead")
    lines = [record for record in caplog.records if record.name == "dbqueue.jobs"]
    told = {line.getMessage().split()[2].rpartition(".")[2]: (line.getMessage(), bool(line.exc_info)) for line in lines}
    assert len(lines) == len(told) == 2
    assert told["slow"][0].endswith("was cancelled in attempt 1")
    assert (told["slow"][1], told["odd"][1]) == (False, True)


@pytest.mark.req("D14")
def test_one_that_swallows_its_cancellation_is_abandoned(queue: DBQueue, told: Told) -> None:
    """It keeps its slot until it returns; the others go on."""
    go = threading.Event()

    @queue.job(max_attempts=1, timeout=0.2)
    async def deaf() -> None:
        while not go.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                continue

    @queue.job(max_attempts=1, timeout=0.2)
    async def other() -> None: ...

    ref = deaf.enqueue()
    with in_thread(queue, slots=4, lease=1) as running:
        found = wait_state(queue, ref.id, "dead")
        assert found.error_kind == "timeout"
        assert len(told.of(events.SlotAbandoned)) == 1
        wait_state(queue, other.enqueue().id, "succeeded")
        assert running.worker.slots.idle == 3
        go.set()
        wait_for(lambda: running.worker.slots.idle == 4)
        assert running.worker.slots.abandoned == 0


@pytest.mark.req("D19", "D12")
def test_the_end_cancels_and_hands_back(queue: DBQueue) -> None:
    started, cancelled = threading.Barrier(2), threading.Event()

    @queue.job(max_attempts=1, timeout=20)
    async def waiting() -> None:
        started.wait(5)
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    ref = waiting.enqueue()
    with in_thread(queue, slots=1, lease=60, shutdown=0.05) as running:
        started.wait(5)
        running.stop()
        assert running.ended() == 0
    assert cancelled.is_set()
    found = record(queue, ref.id)
    assert (found.state, found.attempt, found.error_kind) == ("pending", 0, "released")
    assert not [thread for thread in threading.enumerate() if thread.name == "dbqueue-coroutines"]


@pytest.mark.req("D13", "D15")
def test_a_lost_claim_cancels(queue: DBQueue, told: Told) -> None:
    started, seen = threading.Event(), list[bool]()

    @queue.job(max_attempts=1, timeout=1.4)
    async def waiting() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            job = current_job()
            assert job is not None
            seen.append(job.cancelled)
            raise

    ref = waiting.enqueue()
    with in_thread(queue, slots=1, lease=1.5):
        assert started.wait(5)
        queue.cancel(ref.id)
        told.wait(events.ClaimLost)
    assert seen == [True]
    assert not told.of(events.JobTimedOut)
    assert record(queue, ref.id).state == "cancelled"


@pytest.mark.databases("sqlite")
def test_context_variables_do_not_leak(queue: DBQueue) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
    seen: list[tuple[str, str]] = []

    @queue.job(max_attempts=1, timeout=5)
    async def setting() -> None:
        before = variable.get()
        job = current_job()
        assert job is not None
        variable.set(str(job.id))
        await asyncio.sleep(0.001)
        assert variable.get() == str(job.id)
        assert current_job() is job
        seen.append((before, threading.current_thread().name))

    refs = [setting.enqueue().id for _ in range(6)]
    assert drained(queue, slots=3, lease=10) == 0
    assert {record(queue, job).state for job in refs} == {"succeeded"}
    assert seen == [("nothing", "dbqueue-coroutines")] * 6


@pytest.mark.req("D21")
@pytest.mark.databases("sqlite")
def test_the_kits_drain_runs_coroutines(queue: DBQueue, dbqueue_case: CaseFactory) -> None:
    seen: list[int] = []

    @queue.job(max_attempts=2, timeout=5, retry=60)
    async def waiting() -> None:
        await asyncio.sleep(0.001)
        seen.append(1)
        raise KeyError("p4ssw0rd")

    opened = dbqueue_case(queue)
    waiting.enqueue()
    ended = opened.drain().ended
    assert [(each.outcome, each.summary, type(each.error)) for each in ended] == [("failed", "KeyError", KeyError)]
    assert seen == [1]


# -- the loop alone ----------------------------------------------------------------------------------------------------


class Loop:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.coroutines = Coroutines(self.outcomes.append)

    def start(self, target: Target[None], *, cancelled: bool = False) -> Work:
        row = ClaimedRow(
            ids.new_id(), ids.ZERO, None, target.name, None, target.schema.encode(None), None, "", 0, 0, 1, 0, 1, None, 0, 0
        )  # fmt: skip
        work = Work(row, target, JobContext(row.id, target.name, 1, 1))
        if cancelled:
            work.context.cancel()
        self.coroutines.start(work)
        return work

    def wait(self, count: int = 1) -> Outcome:
        wait_for(lambda: len(self.outcomes) == count)
        return self.outcomes[-1]


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    assert loop.coroutines.close(5)


@pytest.fixture
def nothing() -> Target[None]:
    queue = DBQueue("sqlite:///unused.db")

    @queue.job(max_attempts=1, timeout=5)
    async def nothing() -> None: ...

    return nothing


def test_one_that_is_cancelled_before_its_first_step_ends_too(loop: Loop, nothing: Target[None]) -> None:
    """Its slot would be lost for ever, and the claim renewed."""
    work = loop.start(nothing, cancelled=True)
    outcome = loop.wait()
    assert (outcome.state, outcome.kind, outcome.summary) == (State.PENDING, Kind.FAILED, "CancelledError")
    assert work.context.noticed


@pytest.mark.req("D19")
def test_one_that_had_ended_was_not_stopped_half_way(loop: Loop, nothing: Target[None]) -> None:
    """Its success would be handed back, and the job run twice."""
    work = loop.start(nothing)
    assert loop.wait().state is State.SUCCEEDED
    work.context.cancel()
    loop.start(nothing)
    loop.wait(2)
    assert not work.context.noticed


def test_a_task_that_a_job_left_behind_does_not_end_the_loop(
    loop: Loop, nothing: Target[None], caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    left: list[asyncio.Task[None]] = []

    async def handler() -> None:
        left.append(asyncio.create_task(leave()))

    queue = DBQueue("sqlite:///unused.db")
    loop.start(queue.job(max_attempts=1, timeout=5, name="leaving")(handler))
    loop.wait()
    wait_for(lambda: left[0].done())
    loop.start(nothing)
    assert loop.wait(2).state is State.SUCCEEDED
    assert isinstance(left[0].exception(), SystemExit)
    assert "SystemExit in a task that a job had left behind" in caplog.text


def test_a_blocked_loop_does_not_hold_up_the_end(nothing: Target[None]) -> None:
    go, blocked = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        go.wait(10)

    loop = Loop()
    loop.start(DBQueue("sqlite:///unused.db").job(max_attempts=1, timeout=5, name="block")(block))
    assert blocked.wait(5)
    began = time.monotonic()
    assert not loop.coroutines.close(0.05)
    assert time.monotonic() - began < 3
    go.set()
    loop.wait()
    wait_for(lambda: not loop.coroutines._thread.is_alive())
    assert loop.coroutines._loop.is_closed()
