"""One file, one writer at a time, and many who want to write: everybody waits their turn, and nobody is told "locked"."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

from dbqueue import DatabaseBusy
from dbqueue.database import sqlite
from tests.runtimes.jobs import Jobs, Nap, notes
from tests.runtimes.lab import ROOT, Process, wait_all
from tests.waiting import wait_for

pytestmark = pytest.mark.databases("sqlite")

HELD = 0.6

_PUBLISH = """
import sys
from pathlib import Path
from tests.runtimes.jobs import Jobs, Nap
jobs = Jobs(sys.argv[1], Path(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    jobs.quick.enqueue(Nap())
"""


@pytest.mark.req("D11", "D13")
def test_web_processes_and_workers_share_a_file(jobs: Jobs, start: Callable[..., Process]) -> None:
    """C115. Solid Queue, Django-Q: "database is locked" when enqueueing, claiming and settling. Two publishers and two workers
    write as fast as they can, and for a while a transaction of the application's keeps them all out."""
    url = f"sqlite:///{jobs.queue.database.url.database}"
    workers = [start("-c", 4, "--lease", 60, "-l", "warning") for _ in range(2)]
    command = [sys.executable, "-c", _PUBLISH, url, str(jobs.folder), "80"]
    publishers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    wait_for(lambda: notes(jobs.folder, "end"))
    with closing(sqlite3.connect(str(jobs.queue.database.url.database), timeout=10, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        before = jobs.queue.counts()
        threading.Event().wait(HELD)
        assert jobs.queue.counts() == before, "reading goes on, and writing does not"
        holder.execute("ROLLBACK")
    for publisher in publishers:
        assert publisher.communicate(timeout=30)[0] == ""
        assert publisher.returncode == 0
    wait_all(jobs.queue, lambda counts: counts == {"succeeded": 160})
    assert set(Counter(line.job for line in notes(jobs.folder, "start")).values()) == {1}
    assert [worker.log for worker in workers] == ["", ""]


@pytest.mark.req("D4")
def test_a_lock_that_outlasts_the_patience_is_told_and_nothing_is_written(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C17, C37, C115. kombu's SQL transport: a publisher was given an id although its INSERT had failed."""
    monkeypatch.setattr(sqlite, "LOCK_PATIENCE", 0.2)
    with closing(sqlite3.connect(str(jobs.queue.database.url.database), timeout=10, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        for call in (lambda: jobs.quick.enqueue(Nap()), lambda: jobs.quick.enqueue_many([Nap()] * 2)):
            began = time.monotonic()
            with pytest.raises(DatabaseBusy):
                call()
            assert 0.2 <= time.monotonic() - began < 2
        holder.execute("ROLLBACK")
    assert not any(jobs.queue.counts().values())
    jobs.quick.enqueue(Nap())
    assert jobs.queue.counts()["pending"] == 1
