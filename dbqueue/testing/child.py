"""``python -m dbqueue.testing.child CLOCK SETTINGS APP OPTION...``: the command ``dbqueue worker -A APP OPTION...``,
with the queue of APP bound to a case's database and clock first. Started by ``process`` only.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import threading
from functools import reduce
from pathlib import Path

import msgspec

from dbqueue.queue import DBQueue
from dbqueue.settings import JobSettings
from dbqueue.testing.shared_clock import SharedClock


def main(clock: str, job_settings: str, app: str, *options: str) -> None:
    threading.Thread(target=_die_with_the_parent, name="dbqueue-case-guard", daemon=True).start()
    module, _, attribute = app.partition(":")
    queue = reduce(getattr, attribute.split("."), importlib.import_module(module))
    if not isinstance(queue, DBQueue):
        sys.exit(f"{app} is no DBQueue but a {type(queue).__name__}")
    with queue.rebound(JobSettings(**msgspec.json.decode(job_settings)), SharedClock(Path(clock))):
        sys.argv = ["dbqueue", "worker", "-A", app, *options]
        runpy.run_module("dbqueue", run_name="__main__", alter_sys=True)


def _die_with_the_parent() -> None:
    """A test session that is killed leaves no workers behind."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
