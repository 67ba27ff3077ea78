"""The tasks of `tasks.py` as a test sees them, and workers that run them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dbqueue import DBQueue
from dbqueue.views import JobRecord
from tests.runtimes.jobs import Line, notes, open_gate
from tests.runtimes.lab import Process, wait_state
from tests.waiting import wait_for

APP = "tests.bridge.tasks"


class Lab:
    def __init__(self, url: str, folder: Path, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._start = folder, start
        monkeypatch.setenv("RUNTIMES_URL", url)
        monkeypatch.setenv("RUNTIMES_FOLDER", str(folder))
        spec = importlib.util.spec_from_file_location(APP, Path(__file__).with_name("tasks.py"))
        assert spec is not None
        assert spec.loader is not None
        self.tasks: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, APP, self.tasks)
        spec.loader.exec_module(self.tasks)
        self.queue: DBQueue = self.tasks.queue
        self.queue.database.ready()

    def worker(self, *args: object, pool: str = "threads") -> Process:
        """In it, and in its children, Celery cannot be imported."""
        before = ("env", "BRIDGE_WITHOUT=1")
        return self._start("-P", pool, "-c", 2, *args, app=f"{APP}:queue", before=before).started()

    def noted(self, what: str, count: int = 1) -> list[Line]:
        """Waits for the notes."""
        wait_for(lambda: len(notes(self.folder, what)) >= count, 30, f"not {count} times {what}")
        return notes(self.folder, what)

    def hold(self, step: int) -> None:
        """A climb stops on this step until it is let go."""
        (self.folder / f"hold{step}").touch()

    def let_go(self, step: int) -> None:
        open_gate(self.folder, f"go{step}")

    def ended(self, job: UUID) -> JobRecord:
        return wait_state(self.queue, job, "succeeded", "dead", "blocked", "unknown", "cancelled", deadline=30)

    @property
    def steps(self) -> list[str]:
        return [line.what for line in notes(self.folder) if line.what.startswith("step")]


def outcome(record: JobRecord) -> tuple[Any, ...]:
    return record.state, record.error_kind, record.error_summary
