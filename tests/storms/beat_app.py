"""What `dbqueue beat -A tests.storms.beat_app:queue` finds: schedules of the code, on a clock that the test moves."""

from __future__ import annotations

import os
from pathlib import Path

from dbqueue import DBQueue
from dbqueue.queue import open_database
from dbqueue.testing.shared_clock import SharedClock
from tests.runtimes.jobs import end_with_parent

STATIC = {"code": "*/10 * * * *", "code every": "@every 7h"}


def declare(queue: DBQueue) -> None:
    for name, spec in STATIC.items():
        queue.periodic(name, spec, "raw", 1)


if "BEAT_URL" in os.environ:  # in a beat
    end_with_parent()
    queue = DBQueue(os.environ["BEAT_URL"])
    queue._database = open_database(queue.settings, SharedClock(Path(os.environ["BEAT_CLOCK"])))
    declare(queue)
