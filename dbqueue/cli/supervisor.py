"""``dbqueue worker --processes N``: N worker processes from one command.

Each is a worker of its own, with a loop and connections of its own: they share nothing but the database, so one that dies costs the
others nothing. One that ends with an error is started again, at once after 75 (it asked for that), else after a pause that doubles.
Signals are passed on, each as often as it came.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

log = logging.getLogger("dbqueue")

RESTART_AT_ONCE = 75
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY = 60.0
"""A worker that ran so long ended for a new reason: the pauses begin anew."""


@dataclass(eq=False)
class Place:
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    pause: float = FIRST_PAUSE
    code: int | None = None


def without(arguments: Sequence[str], option: str) -> list[str]:
    """The command line without ``option`` and its value."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == option:
            skip = True
        elif not argument.startswith(option + "="):
            kept.append(argument)
    return kept


def supervise(arguments: Sequence[str], count: int) -> int:
    """Runs until every worker has ended cleanly, or a signal asked for the end; returns the worst exit code."""
    places = [Place() for _ in range(count)]
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for place in places:
            if place.process is not None and place.process.poll() is None:
                place.process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            for place in places:
                _look_after(place, arguments, stopping=bool(signals))
            if all(place.process is None and (place.code == 0 or signals) for place in places):
                return max((place.code or 0 for place in places), default=0)
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for place in places:
            if place.process is not None:
                place.process.kill()
                place.process.wait()


def _look_after(place: Place, arguments: Sequence[str], *, stopping: bool) -> None:
    now = time.monotonic()
    if place.process is not None:
        code = place.process.poll()
        if code is None:
            return
        place.process, place.code = None, code if code >= 0 else 128 - code
        if place.code == 0 or stopping:
            return
        if now - place.started_at >= STEADY:
            place.pause = FIRST_PAUSE
        wait = 0.0 if place.code == RESTART_AT_ONCE else place.pause
        place.start_at, place.pause = now + wait, min(place.pause * 2, LONGEST_PAUSE)
        log.error("a worker process ended with code %d; another one starts in %.3g s", place.code, wait)
    elif not stopping and place.code != 0 and now >= place.start_at:
        # A group of its own: a terminal's Ctrl-C must not reach it twice, once from here.
        place.process = subprocess.Popen([sys.executable, "-m", "dbqueue", *arguments], start_new_session=True)
        place.started_at = now
