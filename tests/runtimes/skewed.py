"""`python -m tests.runtimes.skewed SECONDS ARGUMENT...`: the command `dbqueue ARGUMENT...` in a process whose wall
clock is wrong.

Python's idea of the time of day is shifted before anything of dbqueue is imported. The monotonic clock is not: it
measures durations, and no machine's is hours off.
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

SHIFT = float(sys.argv[1])

_time, _time_ns, _localtime, _gmtime = time.time, time.time_ns, time.localtime, time.gmtime


class _Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return super().now(tz) + datetime.timedelta(seconds=SHIFT)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


def main() -> None:
    vars(time).update(
        time=lambda: _time() + SHIFT,
        time_ns=lambda: _time_ns() + int(SHIFT * 1e9),
        localtime=lambda at=None: _localtime(_time() + SHIFT if at is None else at),
        gmtime=lambda at=None: _gmtime(_time() + SHIFT if at is None else at),
    )
    vars(datetime).update(datetime=_Datetime)
    assert not any(name.partition(".")[0] == "dbqueue" for name in sys.modules)
    from dbqueue.cli import main as command

    sys.argv = ["dbqueue", *sys.argv[2:]]
    command()


if __name__ == "__main__":
    main()
