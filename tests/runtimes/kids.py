"""Workers with child processes: the jobs of `children.py` as a test sees them, and processes as the system sees them."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import termios
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dbqueue import DBQueue
from dbqueue.views import JobRecord
from tests.runtimes.jobs import notes
from tests.runtimes.lab import Process, wait_state
from tests.waiting import wait_for

APP = "tests.runtimes.children:queue"


class Kids:
    """The jobs of `children.py`, and a worker for them."""

    def __init__(self, module: Any, folder: Path, start: Callable[..., Process]) -> None:
        self.module, self.folder, self._start = module, folder, start
        self.queue: DBQueue = module.queue

    def worker(self, *args: object) -> Process:
        """Its lease is long: what happens soon is not the lease's doing."""
        return self._start("-P", "processes", "--lease", 60, *args, app=APP)

    def add(self, target: str, what: str, arg: str = "") -> UUID:
        job: UUID = getattr(self.module, target).enqueue(self.module.Do(what, arg)).id
        return job

    def ended(self, job: UUID, *states: str) -> tuple[str, int, str | None, str | None]:
        found: JobRecord = wait_state(self.queue, job, *(states or ("succeeded", "dead", "unknown", "blocked")))
        return found.state, found.attempt, found.error_kind, found.error_summary

    def noted(self, what: str, count: int = 1) -> list[int]:
        """Waits for the notes; returns the processes that wrote them."""
        # The first note waits for a child, and a busy machine takes its time to start one.
        wait_for(lambda: len(notes(self.folder, what)) >= count, 30, f"not {count} times {what}")
        return [line.pid for line in notes(self.folder, what)]

    def brood(self) -> list[int]:
        """The processes that the job of this name started."""
        file = self.folder / "brood"
        return [int(pid) for pid in wait_for(lambda: file.read_text() if file.exists() else "").split()]


def load(monkeypatch: pytest.MonkeyPatch, url: str, folder: Path) -> Any:
    """A copy of `children.py` for one test: its ``queue`` is on the test's database."""
    monkeypatch.setenv("RUNTIMES_URL", url)
    monkeypatch.setenv("RUNTIMES_FOLDER", str(folder))
    spec = importlib.util.spec_from_file_location("tests.runtimes.children", Path(__file__).with_name("children.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tests.runtimes.children", module)
    spec.loader.exec_module(module)
    return module


# -- processes, as the system sees them --------------------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    """State, parent, group, ...; empty: gone, or a zombie that nobody has reaped yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def descendants(pid: int) -> set[int]:
    parents = {int(p.name): int(stat[1]) for p in Path("/proc").glob("[0-9]*") if (stat := _stat(int(p.name)))}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if _stat(pid)]


def is_frozen(pid: int) -> bool:
    """Each of its threads: SIGSTOP reaches them one after the other."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


def unread(pid: int) -> int:
    """Bytes that wait in the pipes of a process."""
    total = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        if file.readlink().name.startswith("pipe:"):
            pipe, count = os.open(file, os.O_RDONLY | os.O_NONBLOCK), bytearray(4)
            fcntl.ioctl(pipe, termios.FIONREAD, count)
            os.close(pipe)
            total += int.from_bytes(count, sys.byteorder)
    return total


def trackers(pids: set[int]) -> list[int]:
    """multiprocessing's resource tracker, which is none of ours."""
    return [pid for pid in pids if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
