"""What `-A tests.cases.app:queue` finds in a worker process. It uses its queue while it is imported, as some applications do: so a
pooled connection exists before the children are forked."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from dbqueue import DBQueue
from tests.runtimes.jobs import end_with_parent, note

FOLDER = Path(os.environ["RUNTIMES_FOLDER"])
queue = DBQueue(os.environ["RUNTIMES_URL"], **json.loads(os.environ.get("RUNTIMES_OPTIONS", "{}")))
if sys.argv[0] != "-c":  # the server process of the children has another parent
    end_with_parent()
queue.send("imported", os.getpid())


@dataclass(frozen=True)
class Spawn:
    """``count`` jobs more, each written by a call of its own."""

    count: int


@dataclass(frozen=True)
class Number:
    n: int


@queue.job(max_attempts=3, timeout=30, retry=0.05, name="spawn")
def spawn(spawn: Spawn) -> None:
    session = "sqlite"
    if queue.database.dialect.name != "sqlite":
        session = str(queue.database.read(lambda s: s.execute("SELECT pg_backend_pid()"))[0][0])
    note(FOLDER, f"session-{session}")
    for n in range(spawn.count):
        number.enqueue(Number(n))


@queue.job(max_attempts=3, timeout=30, retry=0.05, name="number")
def number(number: Number) -> None:
    note(FOLDER, "number")


@queue.job(max_attempts=2, timeout=30, retry=0.01, name="fails")
def fails(number: Number) -> None:
    note(FOLDER, "fails")
    raise ValueError
