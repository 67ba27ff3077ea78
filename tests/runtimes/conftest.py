"""What the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue, events
from tests.runtimes.jobs import Jobs
from tests.runtimes.lab import Process, Told


@pytest.fixture
def make_queue(database_url: str) -> Iterator[Callable[..., DBQueue]]:
    """Makes queues on the test's database, which has its tables already."""
    made: list[DBQueue] = []

    def make(**options: Any) -> DBQueue:
        made.append(DBQueue(database_url, **options))
        made[-1].database.ready()
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def queue(make_queue: Callable[..., DBQueue]) -> DBQueue:
    return make_queue()


@pytest.fixture
def told() -> Iterator[Told]:
    """The events of this test's workers."""
    told = Told()
    unsubscribe = events.subscribe(told.append)
    yield told
    unsubscribe()


@pytest.fixture
def jobs(database_url: str, tmp_path: Path) -> Iterator[Jobs]:
    """The same targets as in the worker processes, to enqueue them."""
    jobs = Jobs(database_url, tmp_path)
    jobs.queue.database.ready()
    yield jobs
    jobs.queue.close()


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts worker processes; those that still run at the end of the test are killed."""
    made: list[Process] = []

    def start(*args: object, **more: Any) -> Process:
        made.append(Process(database_url, tmp_path, *args, **more))
        return made[-1]

    yield start
    for process in made:
        if process.popen.poll() is None:
            process.kill()
        process.popen.wait(10)
