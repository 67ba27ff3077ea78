"""A queue as a program declares it at import time, on a database that no test could reach."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dbqueue import Bury, DBQueue, Port, RetryLater, current_job

queue = DBQueue("postgresql://nobody:secret@127.0.0.1:1/production", lease=1, retry_base=10, retry_max=10)
unnamed = DBQueue()
mailer: Port[list[str]] = Port("mailer", lambda: ["the real one"])


@dataclass(frozen=True)
class Do:
    what: str = "succeed"
    folder: str = ""


class Failure(Exception):
    pass


@queue.job(max_attempts=2, timeout=3600)
def work(do: Do) -> None:
    if do.what == "fail":
        raise Failure("on purpose")
    if do.what == "bury":
        raise Bury("no use")
    if do.what == "later":
        raise RetryLater("in a minute", delay=60)
    if do.what == "again":
        work.enqueue(do)
    if do.what == "mail":
        mailer.get().append("sent")
    if do.what == "stall":
        job = current_job()
        assert job is not None
        (Path(do.folder) / f"attempt-{job.attempt}").touch()
        if job.attempt == 1:
            job.wait(60)


@queue.job(max_attempts=1, timeout=1, priority=9)
def urgent() -> None: ...


@unnamed.job(max_attempts=1, timeout=30)
def other() -> None: ...
