"""A small file that says that a worker is alive, for a supervisor that can run a command but has no port to ask
(``dbqueue health``).

The worker's loop writes it once a second as long as two things are true: the loop comes round, and the database has
answered it a moment ago. So it grows old when the process is stopped or stuck, when a turn hangs, and when the database
is away; it is gone when the worker has ended as it should. Times in it are this machine's, for a reader on this
machine; no lease depends on them.

Imports nothing but the standard library and errors: a probe runs every few seconds, and must not take one to start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass

from dbqueue.errors import ConfigError

log = logging.getLogger("dbqueue")

EVERY = 1.0
SILENCE = 10.0
"""Seconds without an answer of the database, or three polls if that is more, after which the file is left to grow
old."""
FUTURE = 5.0
"""A file from the future was written before the clock stepped back: it proves nothing, once it is more than this."""
NEVER = float("inf")


class Health:
    """The writer. Without a path it does nothing."""

    def __init__(self, path: str | None, worker: str, poll: float) -> None:
        self._path, self._worker = path, worker
        self._silence = max(SILENCE, 3 * poll)
        self._failed = False
        self.next_at = 0.0 if path is not None else NEVER
        if path is not None:
            folder = os.path.dirname(os.path.abspath(path))
            if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path):
                raise ConfigError(
                    f"the health file {path} cannot be written: name a file in a folder that this user may write to"
                )

    def beat(self, running: int, connected: bool, answered_at: float, *, stopping: bool) -> None:
        """``answered_at`` is of time.monotonic(). A worker that stops asks the database little: then a connection is
        enough."""
        now = time.monotonic()
        if self._path is None or now < self.next_at:
            return
        self.next_at = now + EVERY
        if connected and (stopping or now - answered_at <= self._silence):
            wall = time.time()
            self._write({
                "pid": os.getpid(), "worker": self._worker, "time": round(wall, 3), "running": running,
                "connected": connected, "last_turn": round(wall - (now - answered_at), 3),
            })  # fmt: skip

    def _write(self, content: dict[str, object]) -> None:
        """Whoever reads sees the old text or the new one, never a half."""
        assert self._path is not None
        try:
            with open(self._beside, "w", encoding="ascii") as file:
                file.write(json.dumps(content) + "\n")
            os.replace(self._beside, self._path)
            self._failed = False
        except OSError as error:  # a full disk must not end the worker; the file grows old, and that tells enough
            if not self._failed:
                self._failed = True
                log.warning("the health file %s cannot be written: %s", self._path, type(error).__name__)

    @property
    def _beside(self) -> str:
        return f"{self._path}.{os.getpid()}"

    def close(self) -> None:
        if self._path is not None:
            for path in (self._path, self._beside):
                with contextlib.suppress(OSError):
                    os.unlink(path)


@dataclass(frozen=True)
class Pulse:
    alive: bool
    sentence: str


def pulse(path: str, max_age: float) -> Pulse:
    """What the file says now."""
    try:
        with open(path, encoding="ascii") as file:
            content = json.load(file)
        age = time.time() - float(content["time"])
        who = f"worker {content['worker']} (pid {content['pid']})"
        running = int(content["running"])
    except FileNotFoundError:
        return Pulse(False, f"there is no {path}: the worker has not started, or has ended")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Pulse(False, f"{path} cannot be read as a health file ({type(error).__name__})")
    if age < -FUTURE:
        return Pulse(False, f"{who}: its last sign of life is {-age:.0f} s in the future; the clock was set back since")
    if not age <= max_age:
        told = "it is stuck or gone, or its database does not answer"
        return Pulse(False, f"{who}: its last sign of life is {age:.0f} s old; {told}")
    return Pulse(True, f"{who} was alive {max(0.0, age):.1f} s ago, {running} running")
