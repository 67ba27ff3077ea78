"""A Celery app with any settings: `celery -A tests.examples.configured worker` reads them from the environment."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Queue
from kombu.common import Broadcast


def make(broker: str, notes: Path, *, broadcast: str = "", **settings: Any) -> Celery:
    """``broadcast`` names a queue whose messages go to every worker."""
    app = Celery("configured", broker=broker, set_as_current=False)
    app.conf.update({"task_ignore_result": True, "worker_hijack_root_logger": False, **settings})

    if broadcast:
        app.conf.task_queues = [Queue("celery"), Broadcast(broadcast)]

    def note(text: str) -> None:
        with notes.open("a") as file:
            file.write(text + "\n")

    @app.task(shared=False)  # type: ignore[untyped-decorator]
    def add(name: str) -> None:
        note(f"add {name}")

    @app.task(shared=False)  # type: ignore[untyped-decorator]
    def slow(name: str, seconds: float) -> None:
        note(f"start {name} {os.getpid()}")
        time.sleep(seconds)
        note(f"end {name}")

    @app.task(shared=False)  # type: ignore[untyped-decorator]
    def fail(name: str) -> None:
        note(f"fail {name}")
        raise ValueError(name)

    return app


if "CONFIGURED" in os.environ:
    given = json.loads(os.environ["CONFIGURED"])
    app = make(given["broker"], Path(given["notes"]), **given["settings"])
