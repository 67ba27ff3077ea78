"""``dbqueue worker --processes N``: N worker processes from one command.

Each is a worker of its own, with a loop and connections of its own: they share nothing but the database, so one that dies costs the
others nothing. One that ends with an error is started again, at once after 75 (it asked for that), else after a pause that doubles.
When all of them have ended for wrong usage or configuration, nothing is started again.
Signals are passed on, each as often as it came. If this process is killed, the workers stop as after SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger("dbqueue")

PLACE = "_DBQUEUE_PLACE"
"""Tells a worker which of them it is, from 1."""
RESTART_AT_ONCE, USAGE = 75, 2
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY = 60.0
"""A worker that ran so long ended for a new reason: the pauses begin anew."""


@dataclass(eq=False)
class Place:
    number: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    pause: float = field(default_factory=lambda: FIRST_PAUSE)
    code: int | None = None
    told: int = 0
    """How many of the signals were passed on."""
    ended_when_told: bool = False


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
    places = [Place(number) for number in range(1, count + 1)]
    signals: list[int] = []
    # Only noted here, and passed on below: a worker that is being started just now must hear it, too.
    before = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    lifeline, lifeline_end = os.pipe()
    try:
        while True:
            for place in places:
                _look_after(place, arguments, lifeline, len(signals))
            if all(place.process is None and (place.code in (0, USAGE) or signals) for place in places):
                return max((place.code or 0 for place in places), default=0)
            time.sleep(0.05)
    finally:
        for place in places:
            if place.process is not None:
                place.process.kill()
                place.process.wait()
        os.close(lifeline)
        os.close(lifeline_end)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _look_after(place: Place, arguments: Sequence[str], lifeline: int, signals: int) -> None:
    now = time.monotonic()
    if place.process is None:
        if signals:
            place.code = place.code if place.ended_when_told else 0
        elif place.code != 0 and now >= place.start_at:
            # A group of its own: a terminal's Ctrl-C must not reach it twice, once from here.
            place.process = subprocess.Popen(
                [sys.executable, "-m", "dbqueue.cli.supervisor", str(lifeline), *arguments],
                start_new_session=True, pass_fds=[lifeline], env={**os.environ, PLACE: str(place.number)},
            )  # fmt: skip
            place.started_at = now
        return
    code = place.process.poll()
    if code is None:
        if place.told < signals:
            place.told += 1  # one at a time: two that are both pending would count as one
            place.process.send_signal(signal.SIGTERM)
        return
    place.process, place.code = None, code if code >= 0 else 128 - code
    if signals:
        place.ended_when_told = True
        if code == -signal.SIGTERM:  # it was still starting
            place.code = 0
        return
    if place.code == 0:
        return
    if now - place.started_at >= STEADY:
        place.pause = FIRST_PAUSE
    wait = 0.0 if place.code == RESTART_AT_ONCE else place.pause
    place.start_at, place.pause = now + wait, min(place.pause * 2, LONGEST_PAUSE)
    log.error("a worker process ended with code %d; another one starts in %.3g s", place.code, wait)


def watch(lifeline: int) -> None:
    """In a worker: when the supervisor is gone, however it ended, nobody passes signals on any more, so it stops as after SIGTERM."""

    def wait() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    os.set_inheritable(lifeline, False)
    threading.Thread(target=wait, name="dbqueue-lifeline", daemon=True).start()


if __name__ == "__main__":
    from dbqueue.cli import main

    watch(int(sys.argv.pop(1)))
    main()
