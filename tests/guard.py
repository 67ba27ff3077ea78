"""Outlives the test session to stop its servers and remove their files, however the session ends.

`kill -9` gives the session no chance to clean up, so a small process in a session of its own holds the other end of a
pipe. A byte, or the end of the pipe, says that the test session has exited or died; then every server below the given
directories is stopped and the directories are removed. It runs as a script, with nothing but the standard library, so
that it starts in a blink.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_STOP_S = 5.0


def main(directories: list[Path]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_the_end_of_the_session()
    for directory in directories:
        for pid_file in directory.glob("*/data/postmaster.pid"):
            _stop(pid_file)
        _remove(directory)


def _wait_for_the_end_of_the_session() -> None:
    parent = os.getppid()
    # A process that a test forked and left behind keeps the pipe open, hence the look at the parent as well.
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], 0.5)
        if readable:
            return


def _stop(pid_file: Path) -> None:
    # A server removes its pid file as its last act. Asking whether the process is there would not do: a container
    # whose first process never reaps orphans keeps it as a zombie.
    try:
        pid = int(pid_file.read_text().split()[0])
        os.kill(pid, signal.SIGQUIT)
        deadline = time.monotonic() + _STOP_S
        while pid_file.exists():
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)
    except (OSError, ValueError, IndexError):
        return  # it has gone already


def _remove(directory: Path) -> None:
    # An initdb that was under way goes on for a moment and writes new files behind our back.
    deadline = time.monotonic() + _STOP_S
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
