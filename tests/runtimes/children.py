"""What `-A tests.runtimes.children:queue` finds: jobs at module level, where child processes find them. `load` gives a test the same.

One record says what a job does; the targets differ in what the queue does with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import hashlib
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from dbqueue import Bury, DBQueue, JobError, RetryLater, current_job, settings, using
from dbqueue.errors import GoOn
from dbqueue.runtime import running, worker
from tests.runtimes.jobs import end_with_parent, note
from tests.waiting import wait_for

FOLDER = Path(os.environ["RUNTIMES_FOLDER"])
if os.environ.get("RUNTIMES_FREE") == "1":
    settings.check_lease_rule = lambda *_: None
    worker.obstacle = lambda row, target, longest: running.obstacle(row, target, running.NEVER)  # type: ignore[attr-defined]
queue = DBQueue(os.environ["RUNTIMES_URL"])
if "RUNTIMES_OPTIONS" in os.environ:  # in a worker
    end_with_parent()
if (FOLDER / "broken").exists() and (multiprocessing.parent_process() is not None or sys.argv[0] == "-c"):
    raise ValueError("this application\nis broken")


class Refused(JobError):
    pass


@dataclass(frozen=True)
class Do:
    what: str
    arg: str = ""


seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")
hoard: list[bytes] = []


def act(do: Do) -> None:
    note(FOLDER, f"{do.what}")
    job = current_job()
    assert job is not None
    if do.what == "busy":
        while True:
            pass
    elif do.what == "exit":
        os._exit(3)
    elif do.what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do.what == "segfault":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(0)
    elif do.what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do.what == "gate":
        wait_for((FOLDER / f"{do.arg}.open").exists, 30)
        note(FOLDER, "passed")
    elif do.what == "watch":
        if job.wait(30):
            note(FOLDER, "cancelled")
    elif do.what == "later":
        raise RetryLater("not yet", delay=0.03)
    elif do.what == "bury":
        raise Bury("no such thing")
    elif do.what == "own":
        raise Refused("card 1")
    elif do.what == "foreign":
        raise KeyError("4111 1111")
    elif do.what == "leak":
        hoard.append(b"x" * 100_000_000)
    elif do.what == "grow":
        raise GoOn("not yet", plain.schema.encode(Do("digest", "y" * int(do.arg))), delay=0)
    elif do.what == "digest":
        note(FOLDER, hashlib.sha256(do.arg.encode()).hexdigest())
    elif do.what == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            note(FOLDER, f"sum{sum(pool.map(abs, range(-9, 0)))}")
    elif do.what == "brood":  # a child of its own, which holds our pipes open, and a program; then it dies or hangs
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
        fork.start()
        (FOLDER / "brood").write_text(f"{fork.pid} {subprocess.Popen(['sleep', '300']).pid}")
        if do.arg == "exit":
            os._exit(3)
        threading.Event().wait()
    elif do.what == "terminate":
        program = subprocess.Popen(["sleep", "300"])
        program.terminate()
        note(FOLDER, f"ended{program.wait(10)}")
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
        fork.start()
        fork.terminate()
        fork.join(10)
        note(FOLDER, f"forked{fork.exitcode}")
    elif do.what == "enqueue":
        plain.enqueue(Do("alone"))
        enqueue_joined()
    elif do.what == "context":
        note(FOLDER, seen.get())
        seen.set("something")


def enqueue_joined() -> None:
    """In a transaction of the job's own, once rolled back and once committed."""
    url = os.environ["RUNTIMES_URL"]
    file = url.removeprefix("sqlite:///")
    for how in ("rollback", "commit"):
        connection: Any = psycopg.connect(url) if file == url else sqlite3.connect(file, isolation_level=None)
        connection.execute("BEGIN" if file == url else "BEGIN IMMEDIATE")
        with using(connection):
            plain.enqueue(Do("joined"))
        connection.execute(how.upper())
        connection.close()


@queue.job(max_attempts=2, timeout=20, retry=0.02, name="plain")
def plain(do: Do) -> None:
    act(do)


@queue.job(max_attempts=2, timeout=0.5, retry=0.02, name="short")
def short(do: Do) -> None:
    act(do)


@queue.job(max_attempts=2, timeout=20, retry=0.02, on_crash="unknown", name="unknown")
def unknown(do: Do) -> None:
    act(do)


@queue.job(max_attempts=2, timeout=20, retry=0.02, on_crash="fail", name="fail")
def fail(do: Do) -> None:
    act(do)


@queue.job(max_attempts=2, timeout=20, retry=0.02, name="coroutine")
async def coroutine(do: Do) -> None:
    note(FOLDER, do.what)
    if do.what == "watch":
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            note(FOLDER, "cancelled")
            raise
