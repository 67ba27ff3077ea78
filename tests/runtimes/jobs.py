"""The jobs that worker processes run in these tests. What a handler did is told by lines in files of the test's
folder: one write with O_APPEND each, so that they survive a kill and do not mix.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbqueue import DBQueue, current_job
from dbqueue.targets import Target


@dataclass(frozen=True)
class Nap:
    seconds: float = 0.0


@dataclass(frozen=True)
class Gate:
    """A job that waits for a file to appear."""

    name: str


@dataclass(frozen=True)
class Line:
    """What a handler noted: a job's attempt, in a process, at an instant of time.monotonic(), which processes share."""

    what: str
    job: str
    attempt: int
    pid: int
    at: float


def note(folder: Path, what: str) -> None:
    job = current_job()
    assert job is not None
    line = f"{what} {job.id} {job.attempt} {os.getpid()} {time.monotonic():.6f}\n"
    file = os.open(folder / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def notes(folder: Path, what: str | None = None) -> list[Line]:
    try:
        text = (folder / "notes").read_text()
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        word, job, attempt, pid, at = line.split()
        if what in (None, word):
            found.append(Line(word, job, int(attempt), int(pid), float(at)))
    return found


def open_gate(folder: Path, name: str) -> None:
    (folder / f"{name}.open").touch()


class Jobs:
    """A queue and its targets; the worker process and the test make the same ones."""

    def __init__(self, url: str, folder: Path, **options: Any) -> None:
        self.queue = queue = DBQueue(url, **options)
        self.folder = folder

        @queue.job(max_attempts=20, timeout=0.9, retry=0.05, name="quick")
        def quick(nap: Nap) -> None:
            note(folder, "start")
            time.sleep(nap.seconds)
            note(folder, "end")

        @queue.job(max_attempts=3, timeout=30, retry=0.05, name="long")
        def long(nap: Nap) -> None:
            note(folder, "start")
            time.sleep(nap.seconds)
            note(folder, "end")

        @queue.job(max_attempts=3, timeout=30, retry=0.05, name="gated")
        def gated(gate: Gate) -> None:
            """Ends when its gate opens, or when it is told to stop."""
            note(folder, "start")
            job = current_job()
            assert job is not None
            while not (folder / f"{gate.name}.open").exists():
                if job.wait(0.005):
                    note(folder, "cancelled")
                    return
            note(folder, "end")

        @queue.job(max_attempts=3, timeout=30, retry=0.05, name="deaf")
        def deaf(gate: Gate) -> None:
            """As ``gated``, but it never looks at its flag."""
            note(folder, "start")
            while not (folder / f"{gate.name}.open").exists():
                time.sleep(0.005)
            note(folder, "end")

        @queue.job(max_attempts=3, timeout=0.9, name="killer")
        def killer() -> None:
            note(folder, "start")
            os.kill(os.getpid(), signal.SIGKILL)

        @queue.job(max_attempts=3, timeout=0.9, on_crash="unknown", name="killer_unknown")
        def killer_unknown() -> None:
            note(folder, "start")
            os.kill(os.getpid(), signal.SIGKILL)

        @queue.job(max_attempts=3, timeout=0.9, on_crash="fail", name="killer_fail")
        def killer_fail() -> None:
            note(folder, "start")
            os.kill(os.getpid(), signal.SIGKILL)

        self.quick, self.long = quick, long
        self.gated, self.deaf = gated, deaf
        self.killer, self.killer_unknown, self.killer_fail = killer, killer_unknown, killer_fail

    def target(self, name: str) -> Target[Any]:
        return self.queue.targets[name]


def end_with_parent() -> None:
    """A test session that is killed leaves no workers behind: a process whose parent is gone ends."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
