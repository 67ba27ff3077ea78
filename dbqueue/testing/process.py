"""A real ``dbqueue worker`` process of a case, as its parent sees it. ``child`` is the other side."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from dbqueue.errors import InvalidArgument
from dbqueue.settings import JobSettings

CHILD = "dbqueue.testing.child"


class ProcessTrouble(AssertionError):
    """A process of the case ended, or did not do in time what the test waits for; the message has the end of its
    log."""


class Process:
    """Made by ``case.process(...)``."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen, self._log = popen, log
        self.pid = popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    @property
    def log(self) -> str:
        """What it wrote to stdout and stderr until now."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def terminate(self) -> None:
        """SIGTERM: it claims nothing more, lets running jobs end, and exits."""
        self._popen.terminate()

    def kill(self) -> None:
        """SIGKILL: it dies at once, and its jobs keep their leases; ``case.advance(7200)`` ends them."""
        self._popen.kill()

    def wait(self, within: float = 20.0) -> int:
        """Its exit code once it has ended; negative: the signal that killed it. Raises ProcessTrouble after ``within``
        seconds."""
        try:
            return self._popen.wait(within)
        except subprocess.TimeoutExpired:
            raise ProcessTrouble(f"process {self.pid} has not ended within {within:g} s\n{self.log}") from None

    def end(self) -> None:
        """Kills it with everything that it started; called when the case ends."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def __repr__(self) -> str:
        return f"<Process {self.pid} {'running' if self.running else f'ended: {self._popen.returncode}'}>"


def start(app: str, options: Sequence[str], job_settings: JobSettings, folder: Path, number: int) -> Process:
    if not re.fullmatch(r"[\w.]+:[\w.]+", app):
        raise InvalidArgument('process() takes the queue as "module:attribute", for instance "shop.jobs:queue"')
    log = folder / f"worker-{number}.log"
    arguments = [str(folder / "clock"), msgspec.json.encode(asdict(job_settings)).decode(), app, *map(str, options)]
    with open(log, "wb") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", CHILD, *arguments],
            # A pipe that nobody writes to: its end tells the child that this process is gone, however it went.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # a group of its own, so that all it starts can be killed with it
        )
    return Process(popen, log)
