"""The app of test_guarantees.py: `celery -A tests.examples.columns worker`, whose settings say when a message is acknowledged."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task

COLUMN = json.loads(os.environ["COLUMN"])
NOTES = Path(COLUMN["notes"])
app = Celery("columns", broker=COLUMN["url"], backend=COLUMN["url"])
app.conf.update(COLUMN["settings"])


def note(text: str) -> None:
    with NOTES.open("a") as file:
        file.write(text + "\n")


@app.task
def held(name: str, until: str) -> str:
    note(f"start {name} {os.getpid()}")
    while not os.path.exists(until):
        time.sleep(0.01)
    note(f"end {name}")
    return name


@app.task(time_limit=1)
def endless(name: str) -> None:
    note(f"start {name}")
    time.sleep(600)


@app.task
def fails(name: str) -> None:
    note(f"start {name}")
    raise ValueError(name)


@app.task
def tell(name: str) -> None:
    note(f"start {name}")


def die_once(name: str) -> None:
    """With the whole worker, which has a process group of its own."""
    if f"killed {name}" not in NOTES.read_text().splitlines():
        note(f"killed {name}")
        os.killpg(os.getpgrp(), signal.SIGKILL)


class Killed(Task):  # type: ignore[misc]
    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """By now the result is stored and the next of the chain is sent."""
        name, when, _ = args
        if when == "after the result":
            die_once(name)


@app.task(base=Killed)
def killed(name: str, when: str, until: str) -> str:
    note(f"start {name}")
    while not os.path.exists(until):
        time.sleep(0.01)
    if when == "before the result":
        die_once(name)
    return name
