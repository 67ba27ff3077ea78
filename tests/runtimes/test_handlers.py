"""What a handler sees, and what the worker tells about it: to subscribers, and in its log."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import pytest

from dbqueue import Bury, DBQueue, current_job, events
from dbqueue.runtime.log import log_events, write
from tests.runtimes.jobs import Gate, Jobs, Nap, notes, open_gate
from tests.runtimes.lab import Process, Told, drained, in_thread, wait_all, wait_state
from tests.waiting import wait_for

_colour: ContextVar[str] = ContextVar("colour", default="none")


@dataclass(frozen=True)
class Secret:
    text: str


def test_what_one_job_sets_the_next_one_does_not_see(queue: DBQueue) -> None:
    seen: list[tuple[str, str]] = []
    thread = threading.local()

    @queue.job(max_attempts=1, timeout=5)
    def painting() -> None:
        seen.append((_colour.get(), getattr(thread, "name", "none")))
        _colour.set("red")
        thread.name = "slot"

    _colour.set("blue")
    for _ in range(3):
        painting.enqueue()
    drained(queue, slots=1)
    assert [colour for colour, _ in seen] == ["none"] * 3, "neither the last job's nor the starter's"
    assert [name for _, name in seen] == ["none", "slot", "slot"], "it was the same thread"
    assert _colour.get() == "blue"


def test_a_handler_knows_its_job(queue: DBQueue) -> None:
    seen: list[tuple[object, ...]] = []

    @queue.job(max_attempts=2, timeout=5, retry=0)
    def curious() -> None:
        job = current_job()
        assert job is not None
        seen.append((job.id, job.target, job.attempt, job.max_attempts, job.cancelled))
        if job.attempt == 1:
            raise ValueError

    ref = curious.enqueue()
    drained(queue, slots=1)
    assert seen == [(ref.id, curious.name, attempt, 2, False) for attempt in (1, 2)]
    assert current_job() is None


@pytest.mark.req("D10")
def test_neither_events_nor_the_log_tell_what_was_in_a_job(
    queue: DBQueue, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """Ends of every kind, with a payload, a key and an error text that must not leak. (A traceback may quote
    anything: `dbqueue.jobs`.)"""
    marks = ("p4yload", "k3y", "t3xt")

    @queue.job(max_attempts=2, timeout=0.2, retry=0)
    def job(secret: Secret) -> None:
        running = current_job()
        assert running is not None
        if secret.text.endswith("fail"):
            raise ValueError("t3xt")
        if secret.text.endswith("bury"):
            raise Bury
        if secret.text.endswith("slow"):
            running.wait(5)

    for n, end in enumerate(("succeed", "fail", "bury", "slow")):
        job.enqueue(Secret(f"p4yload {end}"), key=f"k3y{n}")
    with caplog.at_level(logging.DEBUG, "dbqueue"):
        unsubscribe = events.subscribe(write)
        try:
            drained(queue, slots=2, lease=5)
        finally:
            unsubscribe()
    assert {type(event) for event in told} >= {events.JobStarted, events.JobEnded, events.JobTimedOut}
    for event in told:
        assert not any(mark in repr(event) for mark in marks), event
    lines = [line for line in caplog.records if line.name != "dbqueue.jobs"]
    assert len(lines) >= 12
    for line in lines:
        assert not any(mark in line.getMessage() for mark in marks), line.getMessage()
        assert line.exc_info is None


@pytest.mark.req("D10")
def test_the_log_of_a_worker_process(jobs: Jobs, start: Callable[..., Process]) -> None:
    """A line for each end, with what one looks for: job, target, attempt, how long it took, and why."""
    worker = start("-c", 2, "--lease", 60, "-l", "debug").started()
    done = jobs.quick.enqueue(Nap(0.05), key="k3y").id
    held = jobs.gated.enqueue(Gate("secret-gate")).id
    wait_state(jobs.queue, done, "succeeded")
    wait_for(lambda: len(notes(jobs.folder, "start")) == 2)
    open_gate(jobs.folder, "secret-gate")
    wait_all(jobs.queue, lambda counts: counts == {"succeeded": 2})
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0
    log = worker.log
    started = re.search(rf"DEBUG dbqueue: job {done} quick started, attempt 1, queue default\n", log)
    ended = re.search(rf"INFO dbqueue: job {done} quick succeeded, attempt 1, (\d+\.\d+) s\n", log)
    assert started is not None
    assert ended is not None
    assert started.start() < ended.start()
    assert 0.05 <= float(ended[1]) < 2
    assert f"job {held} gated succeeded" in log
    assert "secret-gate" not in log
    assert "k3y" not in log


@pytest.mark.req("D10")
def test_failures_are_told_with_their_kind_and_what_follows(queue: DBQueue, caplog: pytest.LogCaptureFixture) -> None:
    @queue.job(max_attempts=2, timeout=5, retry=0.05)
    def failing() -> None:
        raise ValueError("t3xt")

    ref = failing.enqueue()
    with caplog.at_level(logging.INFO, "dbqueue"), log_events(), in_thread(queue, slots=1):
        wait_state(queue, ref.id, "dead")
    lines = [(line.levelname, line.getMessage()) for line in caplog.records if "attempt" in line.getMessage()]
    name = re.escape(f"job {ref.id} {failing.name} ")
    told = [(level, text) for level, text in lines if " raised " not in text]
    assert [level for level, _ in told] == ["WARNING", "ERROR"]
    assert re.fullmatch(name + r"pending, attempt 1, \d\.\d{3} s, failed: ValueError, again in 0\.05 s", told[0][1])
    assert re.fullmatch(name + r"dead, attempt 2, \d\.\d{3} s, failed: ValueError", told[1][1])
    raised = [line for line in caplog.records if " raised " in line.getMessage()]
    assert all(line.name == "dbqueue.jobs" and line.exc_info for line in raised), "the traceback is there for people"


def test_a_stopped_workers_threads_end(queue: DBQueue) -> None:
    @queue.job(max_attempts=1, timeout=5)
    def job() -> None: ...

    before = threading.active_count()
    for _ in range(8):
        job.enqueue()
    drained(queue, slots=4)
    wait_for(lambda: threading.active_count() == before)
