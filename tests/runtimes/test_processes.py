"""Process slots, with real workers, children and kills: a job can end its child, and nothing else."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbqueue import DBQueue
from dbqueue.errors import ConfigError
from dbqueue.runtime.processes import ProcessSlots
from dbqueue.runtime.worker import Worker, WorkerOptions
from tests.runtimes.jobs import notes, open_gate
from tests.runtimes.kids import APP, Kids, alive, descendants, is_frozen, load, trackers, unread
from tests.runtimes.lab import Process, record, wait_state
from tests.waiting import wait_for


@pytest.fixture
def kids(database_url: str, tmp_path: Path, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> Any:
    kids = Kids(load(monkeypatch, database_url, tmp_path), tmp_path, start)
    kids.queue.database.ready()
    yield kids
    kids.queue.close()


# -- what a job can do to its child ------------------------------------------------------------------------------------


@pytest.mark.req("D14", "D11")
def test_a_job_is_killed_at_its_timeout_and_the_others_go_on(kids: Kids) -> None:
    worker = kids.worker("-c", 2).started()
    other = kids.add("plain", "gate", "g")
    kids.noted("gate")
    busy = kids.add("short", "busy")
    assert kids.ended(busy) == ("dead", 2, "timeout", None)
    lines = notes(kids.folder, "busy")
    assert [line.attempt for line in lines] == [1, 2]
    assert lines[1].at - lines[0].at >= 0.5
    wait_for(lambda: not alive(line.pid for line in lines))
    assert record(kids.queue, other).state == "running"
    open_gate(kids.folder, "g")
    assert kids.ended(other) == ("succeeded", 1, None, None)
    assert "Traceback" not in worker.log


@pytest.mark.req("D12", "D14")
def test_a_crash_costs_its_own_job_one_attempt_at_once(kids: Kids) -> None:
    kids.worker("-c", 2).started()
    other = kids.add("plain", "gate", "g")
    kids.noted("gate")
    jobs = {what: kids.add("plain", what) for what in ("exit", "kill", "segfault")}
    jobs |= {policy: kids.add(policy, "kill") for policy in ("unknown", "fail")}
    assert {what: kids.ended(job) for what, job in jobs.items()} == {
        "exit": ("dead", 2, "crashed", "its process ended: exit code 3"),
        "kill": ("dead", 2, "crashed", "its process ended: signal 9"),
        "segfault": ("dead", 2, "crashed", "its process ended: signal 11"),
        "unknown": ("unknown", 1, "crashed", "its process ended: signal 9"),
        "fail": ("dead", 1, "crashed", "its process ended: signal 9"),
    }
    after = kids.add("plain", "after")
    assert kids.ended(after)[:2] == ("succeeded", 1), "the last child was replaced, too"
    open_gate(kids.folder, "g")
    assert kids.ended(other)[:2] == ("succeeded", 1)


@pytest.mark.req("D12", "D14")
@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("how", ["exit", "hang"])
def test_what_a_job_started_ends_with_its_child_and_hides_no_end(kids: Kids, how: str) -> None:
    """The job's own child has its ends of the pipes: that its parent died shows by the process only."""
    kids.worker("-c", 1).started()
    job = kids.add("fail", "brood", "exit") if how == "exit" else kids.add("short", "brood")
    assert kids.ended(job)[2] == ("crashed" if how == "exit" else "timeout")
    wait_for(lambda: not alive(kids.brood()))
    assert kids.ended(kids.add("plain", "after"))[:2] == ("succeeded", 1)


@pytest.mark.req("D14", "D10")
def test_what_a_job_says_crosses_the_pipe(kids: Kids) -> None:
    """And what it may do in a child: a large payload, processes of its own, signals to them, jobs of its own, no leaks."""
    worker = kids.worker("-c", 1).started()
    says = {what: kids.add("plain", what) for what in ("later", "bury", "own", "foreign")}
    assert {what: kids.ended(job) for what, job in says.items()} == {
        "later": ("dead", 2, "failed", "RetryLater: not yet"),
        "bury": ("dead", 1, "rejected", "Bury: no such thing"),
        "own": ("dead", 2, "failed", "Refused: card 1"),
        "foreign": ("dead", 2, "failed", "KeyError"),
    }
    large = "x" * (1_048_576 - 100)
    does = [kids.add("plain", what) for what in ("pool", "terminate", "context", "context", "enqueue")]
    grows = kids.add("plain", "grow", "1000000")
    does += [kids.add("plain", "digest", large), kids.add("coroutine", "async")]
    assert {kids.ended(job)[:2] for job in does} == {("succeeded", 1)}, worker.log
    for what in (
        "sum45",
        f"ended{-signal.SIGTERM}",
        f"forked{-signal.SIGTERM}",
        "alone",
        "joined",
        hashlib.sha256(large.encode()).hexdigest(),
        hashlib.sha256(b"y" * 1_000_000).hexdigest(),
    ):
        assert len(kids.noted(what)) == 1, what
    assert kids.ended(grows)[:2] == ("succeeded", 2), "its answer is larger than a pipe"
    assert len(notes(kids.folder, "nothing")) == 2, "what one job set in its context, the next one saw"
    assert len({line.pid for line in notes(kids.folder)}) == 1, "one child did it all"


@pytest.mark.req("D11")
def test_a_frozen_child_holds_up_nobody(kids: Kids) -> None:
    """Neither the other slots, nor the renewal of leases, nor the end; even when it has not read a large order."""
    worker = kids._start("-P", "processes", "-c", 2, "--lease", 2 if "sqlite" not in kids.queue.database.label else 21,
                         app=APP).started()  # fmt: skip
    first, second = (kids.add("plain", "gate", gate) for gate in ("first", "second"))
    kids.noted("gate", 2)
    open_gate(kids.folder, "first")
    kids.ended(first)
    # The other child is still busy, so the next job goes to this one, whatever the order of the children.
    (idle,) = (line.pid for line in notes(kids.folder, "gate") if line.job == str(first))
    os.kill(idle, signal.SIGSTOP)
    wait_for(lambda: is_frozen(idle))
    large = kids.add("plain", "digest", "x" * 1_000_000)
    wait_state(kids.queue, large, "running")
    wait_for(lambda: unread(idle))  # only now is it told: it is claimed a moment earlier
    open_gate(kids.folder, "second")
    assert kids.ended(second)[:2] == ("succeeded", 1)
    for job in [kids.add("plain", "quick") for _ in range(5)]:
        assert kids.ended(job)[:2] == ("succeeded", 1)
    assert record(kids.queue, large).state == "running"
    os.kill(idle, signal.SIGKILL)
    assert kids.ended(large)[:2] == ("succeeded", 1), "it had not begun, so its attempt was given back"
    frozen = kids.add("plain", "freeze")
    kids.noted("freeze")
    held = record(kids.queue, frozen).lease_until
    if "sqlite" not in kids.queue.database.label:
        wait_for(lambda: record(kids.queue, frozen).lease_until != held)
    worker.stop_twice()
    assert worker.ended() == 0
    assert record(kids.queue, frozen).state == "pending"


# -- replaced children -------------------------------------------------------------------------------------------------


@pytest.mark.req("D11")
@pytest.mark.databases("sqlite")
def test_children_are_replaced_after_so_many_jobs(kids: Kids) -> None:
    jobs = [kids.add("plain", "quick") for _ in range(9)]
    worker = kids.worker("-c", 2, "--max-jobs-per-child", 2, "--once")
    assert worker.ended() == 0
    assert {kids.ended(job) for job in jobs} == {("succeeded", 1, None, None)}
    pids = [line.pid for line in notes(kids.folder, "quick")]
    assert len(pids) == 9
    assert max(map(pids.count, pids)) == 2
    assert not alive(pids)


@pytest.mark.req("D11")
@pytest.mark.databases("sqlite")
def test_children_are_replaced_when_they_hold_too_much(kids: Kids) -> None:
    jobs = [kids.add("plain", what) for what in ("quick", "quick", "leak", "quick")]
    worker = kids.worker("-c", 1, "--max-memory-per-child", 120_000, "--once")
    assert worker.ended() == 0
    assert {kids.ended(job)[:2] for job in jobs} == {("succeeded", 1)}
    first, second, third, fourth = (line.pid for line in notes(kids.folder))
    assert first == second == third != fourth


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D19")
def test_the_first_signal_drains_even_when_the_whole_group_gets_it(kids: Kids) -> None:
    """As a service manager sends it: to the worker, the children, and the server process that they are forked from."""
    worker = kids.worker("-c", 2).started()
    jobs = [kids.add("plain", "gate", "g"), kids.add("plain", "gate", "g"), kids.add("plain", "late")]
    kids.noted("gate", 2)
    family = descendants(worker.popen.pid)
    assert len(family) >= 3
    for pid in family - set(trackers(family)):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    worker.signal(signal.SIGTERM)
    wait_for(lambda: " stops (" in worker.log)
    assert not notes(kids.folder, "passed")
    open_gate(kids.folder, "g")
    assert worker.ended() == 0
    assert [record(kids.queue, job).state for job in jobs] == ["succeeded", "succeeded", "pending"]
    wait_for(lambda: not alive(family))


@pytest.mark.req("D19", "D12")
def test_the_flag_reaches_a_child_at_the_deadline(kids: Kids) -> None:
    worker = kids.worker("-c", 3, "--shutdown", 0.1).started()
    jobs = [kids.add("plain", "watch"), kids.add("coroutine", "watch"), kids.add("plain", "busy")]
    kids.noted("watch", 2)
    kids.noted("busy")
    family = descendants(worker.popen.pid)
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0
    assert len(kids.noted("cancelled")) == 2
    found = [record(kids.queue, job) for job in jobs]
    assert {(job.state, job.attempt, job.error_kind) for job in found} == {("pending", 0, "released")}
    assert "Traceback" not in worker.log
    wait_for(lambda: not alive(family), 2)


@pytest.mark.req("D13", "D15")
def test_the_flag_reaches_a_child_whose_claim_was_lost(kids: Kids) -> None:
    worker = kids._start("-P", "prefork", "-c", 1, "--lease", 1, app=APP, free=True).started()
    job = kids.add("plain", "watch")
    kids.noted("watch")
    kids.queue.cancel(job)
    kids.noted("cancelled")
    assert kids.ended(kids.add("plain", "after"))[:2] == ("succeeded", 1)
    assert record(kids.queue, job).state == "cancelled"
    assert worker.popen.poll() is None


@pytest.mark.req("D12", "D19")
def test_children_end_with_a_parent_that_is_killed(kids: Kids, database: str) -> None:
    """Whether the job computes or waits for processes of its own, which end, too."""
    what = "busy" if database == "sqlite" else "brood"
    worker = kids._start("-P", "processes", "-c", 2, "--lease", 1, app=APP, free=True).started()
    job = kids.add("plain", what)
    kids.noted(what)
    family = descendants(worker.popen.pid) | set(kids.brood() if what == "brood" else ())
    worker.kill()
    wait_for(lambda: not alive(family), 2, "children outlive their parent")
    assert record(kids.queue, job).state == "running"
    (kids.folder / "notes").unlink()
    kids._start("-P", "threads", "-c", 1, "--lease", 1, app=APP, free=True).started()
    wait_for(lambda: [line.attempt for line in notes(kids.folder, what)] == [2])


# -- what cannot run in a child ----------------------------------------------------------------------------------------


@pytest.mark.req("D1")
@pytest.mark.databases("sqlite")
def test_a_target_that_a_child_cannot_find_is_refused(database_url: str) -> None:
    queue = DBQueue(database_url)

    @queue.job(max_attempts=1, timeout=5, name="inner")
    def inner() -> None: ...

    with pytest.raises(
        ConfigError, match="'inner' is declared inside a function, where a child process cannot find it"
    ):
        Worker(queue, WorkerOptions(pool="processes", slots=1, lease=60))
    queue.close()


@pytest.mark.req("D12")
def test_an_application_that_cannot_be_imported_ends_the_worker(kids: Kids) -> None:
    job = kids.add("plain", "quick")
    (kids.folder / "broken").touch()
    worker = kids.worker("-c", 4)
    assert worker.ended() == 1
    why = "the application cannot be imported in a child process: ValueError: this application is broken"
    assert sum(why in line for line in worker.log.splitlines()) == 1
    found = record(kids.queue, job)
    assert (found.state, found.attempt) == ("pending", 0)


@pytest.mark.databases("sqlite")
def test_slots_that_are_closed_at_once_leave_nothing_behind(database_url: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        slots = ProcessSlots(2, lambda: None)
        wait_for(lambda: (slots.collect(), slots.idle)[1] == 2)
        family = [child.process.pid for child in slots._children]
        began = time.monotonic()
        assert slots.close(1.0)
        assert time.monotonic() - began < 3.0, "it waited for nothing"
        assert not alive(family)
        assert bystander.poll() is None, "another child of this process"
        bystander.communicate(b"\n", timeout=20)


@pytest.mark.databases("sqlite")
def test_a_child_that_is_being_killed_gets_no_other_job(database_url: str) -> None:
    """Its job may end by itself at the very moment of its timeout; the next one would pay for it with an attempt."""
    slots = ProcessSlots(1, lambda: None)
    wait_for(lambda: (slots.collect(), slots.idle)[1] == 1)
    (child,) = slots._children
    work: Any = SimpleNamespace(abandoned=False)
    child.work = work
    slots.abandon(work)
    child.work = None
    assert slots.idle == 0 or slots._children[0] is not child
    wait_for(lambda: (slots.collect(), slots.idle)[1] == 1 and slots._children[0] is not child)
    assert slots.close(1.0)
