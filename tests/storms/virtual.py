"""Workers in the hand of a test: real ones, stepped by it, in a time that only the test moves on by hours.

There is one offset, the database clock's. The runtime and the database layer read ``time.monotonic()`` through the name
``time`` of their own modules, and there they get a ``VirtualTime``, which adds the same offset: a worker and its database
cannot disagree about how long something took. Threads, locks and the test itself keep the real time.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from dbqueue import DBQueue, current_job
from dbqueue.clock import SECOND, Clock
from dbqueue.errors import Bury, ConnectionLost, RetryLater
from dbqueue.retry import Backoff
from dbqueue.runtime.context import JobContext
from dbqueue.runtime.worker import Worker, WorkerOptions
from dbqueue.targets import Target
from tests.waiting import wait_for

LEASE, POLL, TIMEOUT = 60.0, 0.25, 30.0
SHUTDOWN = 5.0


class VirtualTime:
    """The module ``time``, later by a clock's offset."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return time.monotonic() + self._clock.offset / SECOND

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def move_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Until the test ends, every module of the runtime and of the database layer takes its time from ``clock``."""
    virtual = VirtualTime(clock)
    for name, module in list(sys.modules.items()):
        if name.startswith(("dbqueue.runtime.", "dbqueue.database.")) and vars(module).get("time") is time:
            monkeypatch.setattr(module, "time", virtual)


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a job does in each of its runs: ok, fail, bury, "later SECONDS", linger (until it is told to stop); after the
    last one ok."""

    acts: list[str]

    def act(self, run: int) -> str:
        return self.acts[run] if run < len(self.acts) else "ok"


class Mishap(Exception):
    """What a failing run raises."""


@dataclass
class Handlers:
    """The targets, and what their handlers were seen to do."""

    runs: dict[bytes, list[JobContext]] = field(default_factory=lambda: defaultdict(list))
    """By job; each run has a context of its own."""
    lingering: set[JobContext] = field(default_factory=set)
    targets: dict[str, Target[Plan]] = field(default_factory=dict)

    def declare(self, queue: DBQueue) -> None:
        def run(plan: Plan) -> None:
            job = current_job()
            assert job is not None
            contexts = self.runs[job.id.bytes]
            contexts.append(job)
            act, _, seconds = plan.act(len(contexts) - 1).partition(" ")
            if act == "fail":
                raise Mishap
            if act == "bury":
                raise Bury("no")
            if act == "later":
                raise RetryLater("later", delay=float(seconds))
            if act == "linger":
                self.lingering.add(job)
                assert job.wait(600), "nobody told a lingering job to stop"

        def add(name: str, attempts: int, on_crash: str, retry: Any, jobs: str) -> None:
            self.targets[name] = queue.job(
                name=name, max_attempts=attempts, timeout=TIMEOUT, queue=jobs, retry=retry, on_crash=on_crash
            )(run)

        add("steady", 4, "retry", [60, 3600], "red")
        add("doubtful", 5, "unknown", Backoff(30, 7200, factor=4), "blue")
        add("brittle", 3, "fail", 900, "red")
        add("plain", 3, "retry", None, "blue")


# -- workers -----------------------------------------------------------------------------------------------------------


class LosesAnswers:
    """A dialect whose next turn is done and committed, and whose answer is lost with the connection."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._dialect = worker, worker.dialect

    def turn(self, *args: Any) -> Any:
        self._worker.dialect = self._dialect
        self._dialect.turn(*args)
        raise ConnectionLost("cut before the answer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)


class Hand:
    """A worker without a loop of its own. Between two steps every handler has returned that is going to: what remains are
    the lingering ones that nobody told to stop."""

    def __init__(self, queue: DBQueue, handlers: Handlers, slots: int) -> None:
        self.handlers = handlers
        self.worker = Worker(queue, WorkerOptions(slots=slots, shutdown=SHUTDOWN))
        self.name = self.worker.name
        self.worker.connection.start()

    @property
    def connected(self) -> bool:
        return self.worker.connection.session is not None

    @property
    def returned(self) -> int:
        """Handlers whose outcome the next step takes."""
        return len(self.worker.slots._done)  # type: ignore[attr-defined]

    def step(self) -> float:
        """One step, and the look at news that precedes a sleep; returns how long the worker would sleep."""
        self.worker.step()
        for opening in (self.worker.connection._opening, self.worker.connection._ears):
            if opening is not None:
                wait_for(partial(getattr, opening, "done"), message="no connection")
        wait_for(self._at_rest, message="a handler does not return")
        if not self.worker.finished:
            self.worker._wait(0.0)
        return 0.0 if self.returned else self.worker._pause()

    def _at_rest(self) -> bool:
        working = self.worker.slots.busy - self.returned
        return working == sum(
            work.context in self.handlers.lingering and not work.context.is_cancelled
            for work in self.worker.claims._running
        )

    def cut(self) -> None:
        """Its connection is lost."""
        self.worker.connection.lost(ConnectionLost("cut"))

    def lose_answer(self) -> None:
        """Its next turn will be committed, and it will not learn what came of it."""
        self.worker.dialect = LosesAnswers(self.worker)  # type: ignore[assignment]

    def keep_answers(self) -> None:
        """There was no turn whose answer could be lost."""
        self.worker.dialect = self.worker.database.dialect

    def end(self) -> None:
        """Closes everything and settles nothing: for the database it is a crash, unless the worker had finished."""
        self.worker._close()
