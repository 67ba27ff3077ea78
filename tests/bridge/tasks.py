"""What `-A tests.bridge.tasks:queue` finds: tasks at module level, where child processes find them. `Lab` gives a test the same."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

if "BRIDGE_WITHOUT" in os.environ:
    importlib.import_module("tests.bridge.without")

from celery_bridge import Bridge, SoftTimeLimitExceeded, shared_task
from dbqueue import DBQueue
from tests.runtimes.jobs import end_with_parent, note
from tests.waiting import wait_for

FOLDER = Path(os.environ["RUNTIMES_FOLDER"])


@shared_task
def shared(word: str) -> None:
    note(FOLDER, word)


queue = DBQueue(os.environ["RUNTIMES_URL"])
bridge = Bridge(queue, time_limit=20)
if "RUNTIMES_OPTIONS" in os.environ:  # in a worker
    end_with_parent()


@bridge.task(name="adding", queue="sums")
def add(x: int, y: int = 2) -> int:
    note(FOLDER, f"sum{x + y}")
    if "BRIDGE_WITHOUT" in os.environ:
        try:
            importlib.import_module("celery")
        except ImportError:
            note(FOLDER, "without")
    return x + y


@bridge.task(bind=True, default_retry_delay=0, max_retries=3)
def climb(self: Any, top: int) -> None:
    """Fails on every step below the top. What it does on a step that has a gate waits for it."""
    step = self.request.retries
    note(FOLDER, f"step{step}")
    if (FOLDER / f"hold{step}").exists():
        wait_for(lambda: (FOLDER / f"go{step}.open").exists(), 60)
    if step < top:
        raise self.retry(exc=ValueError("not high enough"))
    note(FOLDER, "top")


@bridge.task(bind=True, max_crashes=2, default_retry_delay=0)
def die(self: Any, first: int = 0) -> None:
    """Retries so often, then kills its process."""
    note(FOLDER, f"die{self.request.retries}")
    if self.request.retries < first:
        raise self.retry()
    os.kill(os.getpid(), signal.SIGKILL)


@bridge.task(soft_time_limit=0.3)
def soft() -> None:
    try:
        wait_for(lambda: False, 15)
    except SoftTimeLimitExceeded:
        note(FOLDER, "cleaned")
        raise
    finally:
        note(FOLDER, "main" if threading.current_thread() is threading.main_thread() else "thread")


@bridge.task(time_limit=0.5)
def hard() -> None:
    note(FOLDER, "hard")
    time.sleep(15)
