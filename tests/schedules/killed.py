"""`python -m tests.schedules.killed URL CLOCK`: for each number N on its input a beat, in a process of its own, that is killed at the
Nth of the moments around its statements: before it is sent, and after it was answered. Says `killed` or `done`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbqueue.database import postgres, sqlite
from dbqueue.database.engine import Database
from dbqueue.runtime.beat import Beat
from dbqueue.testing.shared_clock import SharedClock

WATCHED = ("begin", "execute", "commit")


class Moments:
    def __init__(self, last: int) -> None:
        self.left = last

    def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **more: Any) -> Any:
            self.pass_by()
            answer = call(*args, **more)
            self.pass_by()
            return answer

        return watched


def beat_until(moment: int, url: str, clock: str) -> None:
    database = Database(url, clock=SharedClock(Path(clock)))
    beat = Beat(database, name="doomed")
    beat.start()
    moments = Moments(moment)
    for kind in (postgres.PostgresSession, sqlite.SqliteSession):
        for name in WATCHED:
            setattr(kind, name, moments.around(getattr(kind, name)))
    while beat.step() == 0:
        pass


def main(url: str, clock: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                beat_until(int(line), url, clock)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print({signal.SIGKILL: "killed", 0: "done"}.get(status, f"ended with {status}"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
