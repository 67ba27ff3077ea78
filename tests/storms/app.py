"""What `-A tests.storms.app:queue` finds in a worker process of a storm, and `declare`, which gives the test the same target."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from dbqueue import DBQueue, JobError, current_job
from dbqueue.targets import Target
from tests.runtimes.jobs import end_with_parent, note


@dataclass(frozen=True)
class Gust:
    """A job that takes its time, and fails in each of its first ``failures`` attempts."""

    seconds: float
    failures: int = 0


def declare(queue: DBQueue, folder: Path) -> Target[Gust]:
    # On SQLite a timeout must be below the lease (D18).
    timeout = 0.9 * queue.settings.lease_ms / 1000 if queue.database.dialect.name == "sqlite" else 20

    @queue.job(max_attempts=50, timeout=timeout, retry=0.05, name="gust")
    def gust(gust: Gust) -> None:
        job = current_job()
        assert job is not None
        note(folder, "start")
        time.sleep(gust.seconds)
        if job.attempt <= gust.failures:
            note(folder, "fail")
            raise JobError("as planned")
        note(folder, "end")

    return gust


if "RUNTIMES_OPTIONS" in os.environ:  # in a worker
    end_with_parent()
    queue = DBQueue(os.environ["RUNTIMES_URL"], **json.loads(os.environ["RUNTIMES_OPTIONS"]))
    declare(queue, Path(os.environ["RUNTIMES_FOLDER"]))
