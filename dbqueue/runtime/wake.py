"""The worker loop's one wait: for a finished slot, a signal, a notification, or the time.

``ring`` may be called from any thread and from a signal handler. Nothing is lost between a look and a wait: whoever rings has
made the fact visible first, and the byte in the pipe ends the next wait.
"""

from __future__ import annotations

import os
import select
import time

from dbqueue.database.wakeup import Sleeper


class Wake:
    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._rung = False

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            try:
                os.write(self._writer, b"!")
            except BlockingIOError:  # full: the loop will wake anyway
                pass

    def wait(self, seconds: float, sleeper: Sleeper | None) -> bool:
        """Returns whether the database had news. Raises the driver's error when the listening connection is gone."""
        until = time.monotonic() + max(0.0, seconds)
        number = None if sleeper is None else sleeper.fileno()
        interval = None if sleeper is None else sleeper.interval
        while True:
            left = max(0.0, until - time.monotonic())
            readers = [self._reader] if number is None else [self._reader, number]
            ready, _, _ = select.select(readers, [], [], left if interval is None else min(left, interval))
            if self._reader in ready:
                self._rung = False
                os.read(self._reader, 64)
                return False
            if sleeper is not None and (number in ready or interval is not None) and sleeper.heard():
                return True
            if time.monotonic() >= until:
                return False

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
