"""Cases of docs/cases.md with ``dbqueue worker -A`` in the place of Celery's worker."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import kombu
import pytest

from dbqueue.database.tables import Names
from tests.bridge_worker.projects import Project
from tests.cases.test_transport_workers import Boom
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C6"), pytest.mark.timeout(120)]

Make = Callable[..., Project]


def test_messages_that_cannot_be_read_harm_nobody(make_project: Make, tmp_path: Path) -> None:
    """C127, C140. Each is kept aside after one try, nothing is unpickled, and those beside it are worked on."""
    project, boom = make_project(), tmp_path / "boom"
    task = {"task": "proj.add", "lang": "py"}
    pickled = pickle.dumps([[Boom(boom), 1], {}, {}])
    project.send("add", 0, 0)
    sent = (
        (b"\x80\x81", "application/json", "utf-8", {**task, "id": "undecodable"}),
        (b"not json", "application/json", "utf-8", {**task, "id": "no json"}),
        (b"[]", "application/json", "utf-8", {**task, "id": "no arguments"}),
        (b"{}", "application/json", "utf-8", {}),
        (b"\xff", "application/what", "klingon", {**task, "id": "of no kind"}),
        (pickled, "application/x-python-serialize", "binary", {**task, "id": "pickled"}),
        (pickled, "application/x-python-serialize", "binary", {}),
        (b"[[1, 1], {}, {}]", "application/json", "utf-8", {**task, "id": "damaged"}),
    )
    with kombu.Connection(project.broker_url) as connection:
        channel = connection.default_channel
        for body, kind, encoding, headers in sent:
            channel.basic_publish(channel.prepare_message(body, 0, kind, encoding, headers), "", "proj")
    jobs = Names("dbqueue_").qualified("jobs")
    project.queue.database.run(lambda s: s.execute(f"UPDATE {jobs} SET head = payload WHERE task_id = 'damaged'"))
    project.send("add", 2, 2)
    worker = project.worker(size=1)
    project.idle()
    assert [note for note in project.notes if note.startswith("add")] == ["add 0 0", "add 2 2"]
    assert worker.poll() is None
    assert not boom.exists()
    assert project.queue.counts("proj") == {"succeeded": 2, "blocked": len(sent)}
    assert all(job.attempt <= 1 for job in project.queue.jobs(queue="proj", state="blocked"))


def test_sigterm_to_the_whole_group(make_project: Make, tmp_path: Path) -> None:
    """C135. A platform signals every process of the group: the task ends in its place, once."""
    project = make_project()
    until = tmp_path / "until"
    worker = project.worker(size=1)
    sent = project.send("held", "h", str(until))
    waiting = project.send("tell", "later")
    wait_for(lambda: any(note.startswith("start h") for note in project.notes), 30)
    os.killpg(worker.pid, signal.SIGTERM)
    wait_for(lambda: " stops (" in project.log(worker), 30, "it does not stop")
    until.touch()
    assert worker.wait(30) == 0
    (row,) = project.rows(sent.id)
    assert (row.state, row.attempt, row.lapses) == ("succeeded", 1, 0)
    (row,) = project.rows(waiting.id)
    assert (row.state, row.attempt) == ("pending", 0)
    assert sent.get(timeout=10) == "h"
