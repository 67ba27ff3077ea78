"""The command itself: what it refuses and blocks, its pools, its ends, and other places for results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from tests.bridge_worker.projects import Project
from tests.brokers import redis_url as redis_url
from tests.waiting import wait_for

pytestmark = pytest.mark.req("C6")

Make = Callable[..., Project]


def test_what_cannot_run_is_blocked_and_runs_after_a_deploy(make_project: Make) -> None:
    project = make_project()
    project.app.conf.accept_content = ["json", "pickle"]
    worker = project.worker(size=1)
    pickled = project.send("add", 1, 2, serializer="pickle")
    unknown = project.send("later", 3)
    assert project.value("add", 1, 1) == 2
    (row,) = project.ended(pickled.id)
    assert (row.state, row.error_kind, row.error_summary) == ("blocked", "corrupt_payload", "ContentDisallowed")
    (row,) = project.ended(unknown.id)
    assert (row.state, row.error_kind, row.attempt) == ("blocked", "unknown_target", 0)
    log = project.stop(worker)
    assert "add 1 2" not in project.notes
    assert "again in" not in log  # nothing crashed
    assert project.notes[-1] == "signal worker_shutdown"

    project.write("\n\n@app.task\ndef later(x): return x * 2\n")
    project.worker(size=1)
    project.queue.retry(row.id)
    assert unknown.get(timeout=30) == 6


def test_messages_of_task_protocol_1(make_project: Make) -> None:
    project = make_project(task_protocol=1, accept_content=["json", "pickle"])
    # More than are read with each claim, and before there is a worker that keeps them in memory.
    project.app.control.revoke(["revoked", *[f"other {n}" for n in range(150)]])
    project.worker()
    sent = project.send("see", 1, time_limit=9, soft_time_limit=8, priority=4, headers={"x": "y"})
    seen = sent.get(timeout=30)
    assert (seen["id"], seen["args"], seen["timelimit"], seen["retries"]) == (sent.id, [1], [9, 8], 0)
    assert seen["delivery_info"] == {"exchange": "", "routing_key": "proj", "priority": 4, "redelivered": False}
    assert (seen["correlation_id"], seen["headers"]) == (sent.id, {"x": "y"})
    assert project.value("again", "r", 2, {"countdown": 0.1}) == "r after 2 in proj"
    assert project.value("auto", 2) == 2
    due = time.time() + 0.4
    assert due <= project.value("at", "eta", countdown=0.4) < due + 2
    assert project.value("add", 2, 3, serializer="pickle") == 5
    assert project.value("add", "x", "y" * 1000, compression="zlib") == "x" + "y" * 1000
    project.s("add", 1, 2).apply_async(link=project.s("tell", "linked"))
    project.wait_for_note("told 3 linked")
    with pytest.raises(ValueError, match="f"):
        project.s("fail", "f").apply_async(link_error=project.s("told_of_error", "f")).get(timeout=30)
    project.wait_for_note("error of f: ValueError")
    assert chain(project.s("add", 1, 1), project.s("add", 1)).delay().get(timeout=30) == 3
    assert chord([project.s("add", n, n) for n in range(4)], project.s("total")).delay().get(timeout=30) == 12
    with pytest.raises(TimeLimitExceeded):
        project.value("hard", "h")
    for options in ({"expires": datetime.now(timezone.utc) - timedelta(seconds=1)}, {"task_id": "revoked"}):
        with pytest.raises(TaskRevokedError):
            project.value("tell", "never", **options)
    project.send("later", task_id="unknown")
    project.raw(b"no json")
    project.raw(b'["no task"]')
    project.idle()
    assert "told never" not in project.notes
    jobs = project.queue.jobs(limit=1_000)
    assert sorted((job.state, job.error_kind) for job in jobs if job.state == "blocked") == [
        ("blocked", "corrupt_payload"), ("blocked", "unknown_target"), ("blocked", "unknown_target"),
    ]  # fmt: skip
    assert {job.target for job in jobs} == {"dbqueue.message"}, "the rows stay as they were written"


@pytest.mark.req("H14")
@pytest.mark.parametrize("hours", [-6, 6])
def test_expiry_is_by_the_clock_of_the_database(make_project: Make, hours: int) -> None:
    project = make_project()
    project.worker("-P", "threads", size=1, skew=hours * 3_600)
    now = datetime.now(timezone.utc)
    late, good = (project.send("add", 1, 1, expires=now + timedelta(hours=n)) for n in (-1, 1))
    assert good.get(timeout=30) == 2
    with pytest.raises(TaskRevokedError):
        late.get(timeout=30)


def test_threads(make_project: Make) -> None:
    project = make_project()
    worker = project.worker("-P", "threads")
    pid, main = project.value("where")
    assert (pid, main) == (worker.pid, False)
    assert project.value("again", "t", 2) == "t after 2 in proj"
    assert chord((project.s("add", n, n) for n in range(10)), project.s("total")).delay().get(timeout=30) == 90
    assert project.value("own", "t", False) == "own t"
    assert project.notes.count("before t") == 1
    assert project.value("rejected", "t", True) == "in the end"


@pytest.mark.soak
def test_a_child_is_replaced_after_so_many_tasks(make_project: Make) -> None:
    project = make_project(worker_max_tasks_per_child=2)
    worker = project.worker(size=1)
    pids = [project.value("where")[0] for _ in range(5)]
    assert worker.pid not in pids
    assert [len(set(pids[n : n + 2])) for n in (0, 2)] == [1, 1]
    assert len(set(pids)) == 3


@pytest.mark.soak
@pytest.mark.parametrize("where", ["sqlalchemy", "redis"])
def test_results_elsewhere_come_first(
    make_project: Make, where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if where == "redis":
        pytest.importorskip("redis")
        results = request.getfixturevalue("redis_url")
    else:
        results = f"db+sqlite:///{tmp_path / 'results.db'}"
    project = make_project(results=results)
    project.worker()
    sent = project.send("again", "r", 2)
    assert sent.get(timeout=30) == "r after 2 in proj"
    project.ended(sent.id, 3)
    assert chain(project.s("add", 1, 1), project.s("add", 1), project.s("add", 1)).delay().get(timeout=30) == 4
    parts = [project.s("add", n, n) for n in range(5)]
    assert chord(parts, project.s("total")).delay().get(timeout=30) == 20
    with pytest.raises(TimeLimitExceeded):
        project.value("hard", "elsewhere")


@pytest.mark.soak
def test_no_results_at_all(make_project: Make) -> None:
    project = make_project(results=None)
    project.worker()
    chain(project.s("add", 1, 1), project.s("add", 1), project.s("tell")).delay()
    project.wait_for_note("told 3")
    project.s("fail", "f").apply_async(link_error=project.s("told_of_error", "f"))
    project.wait_for_note("error of f: ValueError")
    project.idle()


def test_a_lost_lease_publishes_and_stores_nothing(make_project: Make, tmp_path: Path) -> None:
    """The worker stands still while its child runs on, and another worker takes the task over."""
    project = make_project()
    until = tmp_path / "until"
    first = project.worker("--lease", "0.5", "-n", "first@proj", size=1)
    sent = chain(project.s("held", "h", str(until)), project.s("tell", "next")).delay()
    wait_for(lambda: any(note.startswith("start h") for note in project.notes), 30)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        project.worker("--lease", "0.5", "-n", "second@proj", size=1)
        wait_for(lambda: sum(note.startswith("start h") for note in project.notes) == 2, 30)
        until.touch()
        wait_for(lambda: project.notes.count("end h") == 2, 30)
        sent.get(timeout=30)
        project.idle()
    finally:
        os.kill(first.pid, signal.SIGCONT)
    project.stop(first)
    assert project.notes.count("told h next") == 1
    assert len(project.rows(sent.id)) == 1
    assert [row.state for row in project.rows(sent.parent.id)] == ["succeeded"]


def test_a_stop_lets_a_task_end(make_project: Make, tmp_path: Path) -> None:
    project = make_project()
    until = tmp_path / "until"
    worker = project.worker(size=1)
    sent = project.send("held", "h", str(until))
    wait_for(lambda: any(note.startswith("start h") for note in project.notes), 30)
    worker.terminate()
    wait_for(lambda: "SIGTERM" in project.log(worker), 30)
    until.touch()
    assert worker.wait(30) == 0
    assert sent.get(timeout=30) == "h"
    assert [row.state for row in project.ended(sent.id)] == ["succeeded"]
