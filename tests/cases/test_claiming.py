"""Who gets which job, how many, and in which order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue, IllegalMove, InvalidArgument, InvalidName, InvalidTarget, RetryLater, events
from tests.runtimes.jobs import Gate, Jobs, Nap, notes, open_gate
from tests.runtimes.lab import Process, Told, drained, in_thread, record, wait_all, wait_state
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]
Start = Callable[..., Process]


@dataclass(frozen=True)
class Number:
    n: int


@pytest.mark.req("D11", "C3")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_twenty_thousand_jobs_of_later_stay_in_the_database(jobs: Jobs, start: Start) -> None:
    """C08. Celery: a worker pulls every scheduled task that it can see into its memory until it is killed for it."""
    worker = start("-c", 1, "--lease", 60).started()
    wait_state(jobs.queue, jobs.quick.enqueue(Nap()).id, "succeeded")
    before = resident(worker.popen.pid)
    for _ in range(2):
        jobs.quick.enqueue_many([Nap()] * 10_000, delay=3600)
    now = jobs.quick.enqueue(Nap()).id
    assert wait_state(jobs.queue, now, "succeeded").attempt == 1
    touched = "SELECT count(*) FROM dbqueue_jobs WHERE attempt > 0 OR worker IS NOT NULL OR ready_at IS NOT NULL"
    assert jobs.queue.database.read(lambda session: session.execute(touched)) == [(0,)]
    assert jobs.queue.counts()["pending"] == 20_000
    assert resident(worker.popen.pid) - before < 8_000_000


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.req("D11", "D12")
def test_worker_processes_share_one_queue_and_do_each_job_once(jobs: Jobs, start: Start) -> None:
    """C23. Django-Q: two clusters read the same row, and each of them updated it and ran it."""
    workers = [start("-c", 8, "--lease", 60, "-l", "warning") for _ in range(2)]
    refs = [jobs.gated.enqueue(Gate("both")) for _ in range(10)]  # neither can take them all
    wait_for(lambda: len({line.pid for line in notes(jobs.folder, "start")}) == 2)
    refs += jobs.quick.enqueue_many([Nap()] * 300)
    open_gate(jobs.folder, "both")
    wait_all(jobs.queue, lambda counts: counts == {"succeeded": 310})
    lines = notes(jobs.folder, "start")
    assert Counter(line.job for line in lines) == Counter(str(ref.id) for ref in refs)
    assert {line.pid for line in lines} == {worker.popen.pid for worker in workers}
    assert {worker.log for worker in workers} == {""}


@pytest.mark.req("D11")
def test_a_busy_worker_reserves_nothing_that_an_idle_one_could_do(make_queue: MakeQueue) -> None:
    """C88, C89. Celery: one worker runs for hours and has reserved the next task; another one is idle and gets nothing."""
    go, ran = threading.Event(), list[str]()

    def declare(place: str) -> DBQueue:
        queue = make_queue()

        @queue.job(max_attempts=1, timeout=20, name="job")
        def job(number: Number) -> None:
            ran.append(f"{number.n} {place}")
            if number.n == 0:
                go.wait(15)

        return queue

    busy, idle = declare("busy"), declare("idle")
    with in_thread(busy, slots=1):
        busy.targets["job"].enqueue(Number(0))
        wait_for(lambda: ran)
        following = [busy.targets["job"].enqueue(Number(n)).id for n in (1, 2, 3)]
        with in_thread(idle, slots=1):
            for job in following:
                wait_state(idle, job, "succeeded")
        assert ran == ["0 busy", "1 idle", "2 idle", "3 idle"]
        go.set()


@pytest.mark.req("D11", "D3")
def test_an_urgent_job_is_the_next_one_to_start(queue: DBQueue, told: Told) -> None:
    """C42. Celery: a high-priority task waits behind low ones that the worker had reserved before."""
    order: list[int] = []
    go = threading.Event()

    @queue.job(max_attempts=1, timeout=20)
    def job(number: Number) -> None:
        order.append(number.n)
        go.wait(15)

    for n in range(6):
        job.enqueue(Number(n), priority=0)
    with in_thread(queue, slots=1) as running:
        told.wait(events.JobStarted)
        job.enqueue(Number(100), priority=9)
        # On PostgreSQL a claim may pass over a priority that is new to it for some milliseconds.
        marks = getattr(running.worker.connection.session, "marks", None)
        wait_for(lambda: marks is None or marks.sweep_due("claim"))
        go.set()
        wait_all(queue, lambda counts: counts == {"succeeded": 7})
    assert order == [0, 100, 1, 2, 3, 4, 5]


@pytest.mark.req("D14", "D11")
def test_retries_give_their_slots_back(queue: DBQueue) -> None:
    """C30. Celery: retried deliveries were not acknowledged, so they filled the prefetch window until the worker stood still."""
    runs: Counter[int] = Counter()

    @queue.job(max_attempts=5, timeout=20)
    def again(number: Number) -> None:
        runs[number.n] += 1
        if runs[number.n] < 4 and number.n < 10:
            raise RetryLater(delay=0.05)

    with in_thread(queue, slots=2) as running:
        for n in range(10):
            again.enqueue(Number(n))
        wait_all(queue, lambda counts: counts == {"succeeded": 10})
        last = again.enqueue(Number(10)).id
        wait_state(queue, last, "succeeded")
        wait_for(lambda: running.worker.slots.idle == 2)
    assert runs == dict.fromkeys(range(10), 4) | {10: 1}


@pytest.mark.req("D3")
@pytest.mark.parametrize("priority", [50, 10, -1, -3, "7", True, 2.5])
def test_a_priority_out_of_range_is_refused_and_never_taken_for_another(queue: DBQueue, priority: Any) -> None:
    """C40. Celery on Redis: numbers outside of 0 to 9 were bent to the top level, so a 50 went before everything."""

    @queue.job(max_attempts=1, timeout=20, name="plain")
    def plain(number: Number) -> None: ...

    with pytest.raises(InvalidTarget):
        queue.job(max_attempts=1, timeout=20, priority=priority, name="other")(lambda: None)
    calls: list[Callable[[], object]] = [
        lambda: plain.enqueue(Number(1), priority=priority),
        lambda: plain.enqueue_many([Number(1)], priority=priority),
        lambda: queue.send("raw", 1, priority=priority),
    ]
    for call in calls:
        with pytest.raises((InvalidTarget, InvalidArgument), match="priority"):
            call()
    assert not any(queue.counts().values())


NAMES = (
    "a.b", "a-b", "a_b", "A_B", "a b", "x" * 200, "x" * 199, "очередь", "q';--", 'q"x', "%", "%s", "a/b", "{a}", "a\\b",
    "celery@host.celery.pidbox",
)  # fmt: skip


@pytest.mark.req("A1")
def test_different_names_are_different_queues(make_queue: MakeQueue) -> None:
    """C83. kombu's PGMQ transport: names were made fit for SQL, so that different names shared a queue, and long ones broke.
    The poll is 30 s here, so each job below was heard of by its queue's own channel."""
    queue = make_queue(poll=30)
    ran: list[str] = []

    def declare(name: str) -> Any:
        @queue.job(max_attempts=1, timeout=20, queue=name, name=f"on {name}"[:200])
        def job() -> None:
            ran.append(name)

        return job

    targets = {name: declare(name) for name in NAMES if len(name) < 200}
    for target in targets.values():
        target.enqueue()
    assert {depth.queue: depth.ready for depth in queue.queues()} == dict.fromkeys(targets, 1)
    drained(queue, slots=1, queues=("a.b",))
    assert ran == ["a.b"]
    drained(queue, slots=4)
    assert sorted(ran) == sorted(targets)
    for name in targets:
        with in_thread(queue, slots=1, queues=(name,)) as running:
            running.asleep()
            job = targets[name].enqueue().id
            assert wait_state(queue, job, "succeeded", deadline=10).queue == name


@pytest.mark.req("A1", "A8")
def test_names_that_no_queue_can_have_are_refused(queue: DBQueue) -> None:
    """C83, the other half: what is not a name is told, and not cut to size."""
    for name in ("", "x" * 201, " a", "a ", "a\nb", "a\0b", "\ud800", 7, None):
        with pytest.raises(InvalidName):
            queue.send(name, 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidName):
            queue.claim(name, "me")  # type: ignore[arg-type]
    for name in NAMES:
        queue.send(name, {"queue": name})
    for name in reversed(NAMES):
        claimed = queue.claim(name, "me")
        assert claimed is not None
        assert claimed.payload == {"queue": name}
        claimed.ack()
        assert queue.claim(name, "me") is None


@pytest.mark.req("D8")
def test_a_job_cancelled_while_no_worker_is_up_never_runs(queue: DBQueue) -> None:
    """C84. Celery: a revoke that is sent while no worker is up is lost, and the task runs later."""
    ran: list[int] = []

    @queue.job(max_attempts=1, timeout=20)
    def job(number: Number) -> None:
        ran.append(number.n)

    first, second = job.enqueue(Number(1), key="k").id, job.enqueue(Number(2)).id
    waiting = job.enqueue(Number(3), delay=60).id
    for ref in (first, waiting):
        assert queue.cancel(ref) == "pending"
    assert not job.enqueue(Number(4), key="k").duplicate, "its key is free again"
    queue.database.clock.advance(61)
    drained(queue, slots=1)
    assert ran == [2, 4]
    assert [record(queue, ref).state for ref in (first, second, waiting)] == ["cancelled", "succeeded", "cancelled"]


@pytest.mark.req("D8")
def test_cancelling_what_has_ended_changes_neither_job_nor_worker(queue: DBQueue) -> None:
    """C86. Celery: revoking tasks that were finished made the worker stop consuming."""

    @queue.job(max_attempts=1, timeout=20)
    def job() -> None: ...

    with in_thread(queue, slots=2):
        done = [job.enqueue().id for _ in range(20)]
        wait_all(queue, lambda counts: counts == {"succeeded": 20})
        for ref in done:
            with pytest.raises(IllegalMove):
                queue.cancel(ref)
        for _ in range(5):
            job.enqueue()
        wait_all(queue, lambda counts: counts == {"succeeded": 25})
