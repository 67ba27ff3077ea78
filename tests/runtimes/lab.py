"""Workers to look at: in a thread of the test, where their parts can be reached, or as processes, which can be
killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from dbqueue import DBQueue, events
from dbqueue.errors import ConnectionLost
from dbqueue.runtime.worker import Worker, WorkerOptions
from dbqueue.views import JobRecord
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

E = TypeVar("E", bound=events.Event)


class Told(list[events.Event]):
    """Every event of this process since the beginning of the test."""

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in list(self) if isinstance(event, kind)]

    def wait(self, kind: type[E], count: int = 1, deadline: float = 10.0) -> list[E]:
        wait_for(lambda: len(self.of(kind)) >= count, deadline, f"no {count} {kind.__name__}")
        return self.of(kind)


class RunningWorker:
    """A worker in a thread. ``code`` is its exit code, once it has ended."""

    def __init__(self, queue: DBQueue, options: dict[str, Any]) -> None:
        self.worker = Worker(queue, WorkerOptions(**options))
        self.code: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.code = self.worker.run()
        except BaseException as error:  # told by ``ended``
            self.error = error

    def stop(self) -> None:
        self.worker.stop()

    def cut(self, until: Callable[[], object] | None = None) -> None:
        """The loop loses its connections before its next step, and does not go on before `until` has returned."""
        step = self.worker.step

        def lose() -> float:
            self.worker.step = step  # type: ignore[method-assign]
            self.worker.connection.lost(ConnectionLost("cut"))
            if until is not None:
                until()
            return step()

        self.worker.step = lose  # type: ignore[method-assign]
        self.worker.wake.ring()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ended(self, deadline: float = 10.0) -> int:
        """Waits for its end; returns the exit code, and raises what ended the loop."""
        self._thread.join(deadline)
        assert not self._thread.is_alive(), "the worker did not end"
        if self.error is not None:
            raise self.error
        assert self.code is not None
        return self.code

    def asleep(self) -> RunningWorker:
        """Returns when it has looked for jobs, found none, and trusts in being woken."""

        def settled() -> bool:
            sleeper = self.worker.connection.sleeper
            asleep = not self.worker._backlog and self.worker._claim_at > time.monotonic()
            return sleeper is not None and sleeper.settled and asleep

        wait_for(settled, message="the worker does not sleep")
        return self


@contextmanager
def in_thread(queue: DBQueue, **options: Any) -> Iterator[RunningWorker]:
    """Runs a worker until the block ends; its loop must not have died."""
    running = RunningWorker(queue, options)
    try:
        yield running
    finally:
        running.stop()
        running.stop()
        running._thread.join(15)
    running.ended()


def drained(queue: DBQueue, **options: Any) -> int:
    """Runs a worker in this thread until nothing is due."""
    return Worker(queue, WorkerOptions(once=True, **options)).run()


class Process:
    """`dbqueue worker` as a user starts it, with the jobs of `jobs.py`."""

    def __init__(
        self, url: str, folder: Path, *args: object, options: dict[str, Any] | None = None, skew: float | None = None,
        free: bool = False, app: str | None = "tests.runtimes.app:queue", before: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """``skew``: seconds by which its wall clock is wrong. ``free``: D18's rule for SQLite, that a lease exceeds
        every timeout, does not hold, so that a job can outlast its lease there too. ``before``: the beginning of the
        command. ``app``: None for a worker of outboxes only."""
        module = ["dbqueue"] if skew is None else ["tests.runtimes.skewed", str(skew)]
        number = len(list(folder.glob("worker-*.log"))) + 1
        self.log_file = folder / f"worker-{number}.log"
        named = [] if app is None else ["-A", app]
        command = [*before, sys.executable, "-m", *module, "worker", *named, *map(str, args)]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "RUNTIMES_URL": url, "RUNTIMES_FOLDER": str(folder),
            "RUNTIMES_OPTIONS": json.dumps(options or {}), "RUNTIMES_FREE": str(int(free)),
        }  # fmt: skip
        with self.log_file.open("wb") as log:
            self.popen = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def started(self) -> Process:
        """Returns when it has connected."""

        def up() -> bool:
            assert self.popen.poll() is None, self.log
            return " slots, lease " in self.log

        wait_for(up, message=f"the worker did not start:\n{self.log}")
        return self

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def stop_twice(self) -> None:
        """Two signals that are both pending would count as one."""
        self.signal(signal.SIGTERM)
        wait_for(lambda: " stops (" in self.log, message=f"the worker took no notice:\n{self.log}")
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)

    def ended(self, deadline: float = 15.0) -> int:
        try:
            return self.popen.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end:\n{self.log}") from None


def record(queue: DBQueue, job_id: UUID) -> JobRecord:
    found = queue.get_job(job_id)
    assert found is not None
    return found


def wait_state(queue: DBQueue, job_id: UUID, *states: str, deadline: float = 10.0) -> JobRecord:
    def found() -> list[JobRecord]:
        seen = record(queue, job_id)
        return [seen] if seen.state in states else []

    return wait_for(found, deadline, f"{job_id} did not become {' or '.join(states)}")[0]


def wait_all(queue: DBQueue, condition: Callable[[dict[str, int]], bool], deadline: float = 20.0) -> dict[str, int]:
    """Waits until the counts of the states meet the condition, and returns them without the empty ones."""
    last: dict[str, int] = {}

    def met() -> bool:
        last.clear()
        last.update({state: n for state, n in queue.counts().items() if n})
        return condition(last)

    try:
        wait_for(met, deadline)
    except AssertionError:
        raise AssertionError(f"the states stayed {last}") from None
    return last
