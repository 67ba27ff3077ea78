"""The worker loop's one wait: for a finished slot, a signal, a notification, or the time.

``ring`` may be called from any thread and from a signal handler, also after ``close``. Nothing is lost between a look
and a wait: whoever rings has made the fact visible first, and the byte in the pair of sockets ends the next wait.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Sequence

from dbqueue.database.wakeup import Sleeper

LONGEST = 60.0


class Wake:
    def __init__(self) -> None:
        self.also: tuple[int, ...] = ()
        """Other files whose readiness ends a wait as a ring does; who waits looks at them himself."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # full: the loop wakes anyway; or closed: there is no loop any more
                self._writer.send(b"!")

    def wait(self, seconds: float, sleeper: Sleeper | None) -> bool:
        """Returns whether the database had news. Raises the driver's error when the listening connection is gone."""
        until = time.monotonic() + min(max(0.0, seconds), LONGEST)
        own, number = self._reader.fileno(), None if sleeper is None else sleeper.fileno()
        numbers = (own, *self.also) if number is None else (own, *self.also, number)
        if sleeper is not None and number is not None and sleeper.heard():
            return True  # it arrived in the middle of a statement of the sleeper's own: there is nothing left to read
        while True:
            left = max(0.0, until - time.monotonic())
            interval = None if sleeper is None else sleeper.interval
            ready = _readable(numbers, left if interval is None else min(left, interval))
            if own in ready:
                self._drain()
                return False
            if self.also and not set(self.also).isdisjoint(ready):
                return False
            if sleeper is not None and (interval is not None or number in ready) and sleeper.heard():
                return True
            if time.monotonic() >= until:
                return False

    def _drain(self) -> None:
        """Reads first and forgets afterwards: a ring in between is for a fact that the loop sees when this wait
        returns. The other way round it would leave the flag set and the sockets empty, and no later ring would be
        heard."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        self._rung = False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def _readable(numbers: Sequence[int], seconds: float) -> list[int]:
    """poll() and not select(), where the system has it: a process may have more than 1,024 open files."""
    if not hasattr(select, "poll"):
        return select.select(numbers, [], [], seconds)[0]
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(math.ceil(seconds * 1000))]
