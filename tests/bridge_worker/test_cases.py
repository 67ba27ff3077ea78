"""Cases of docs/cases.md with ``dbqueue worker -A`` in the place of Celery's worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import kombu
import pytest

from tests.bridge_worker.projects import Project
from tests.cases.test_transport_workers import damage, publish, unreadable
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C6"), pytest.mark.timeout(120)]

Make = Callable[..., Project]


def test_messages_that_cannot_be_read_harm_nobody(make_project: Make, tmp_path: Path) -> None:
    """C127, C140. Each is kept aside after one try, nothing is unpickled, and those beside it are worked on."""
    project, boom = make_project(), tmp_path / "boom"
    sent = unreadable("proj.add", boom)
    project.send("add", 0, 0)
    with kombu.Connection(project.broker_url) as connection:
        publish(connection.default_channel, "proj", sent)
    damage(project.queue)
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
