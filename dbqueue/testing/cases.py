"""A case: one queue on a database of its own, for one test.

While it is open the queue leads to a new SQLite file, migrated, with the greatest lease (so every legal timeout passes
the lease rule) and a clock that only the test moves. Targets need no change: what was declared at import time, on
whatever URL, writes there. What the code says beside the URL (retry_base, workers, prefix ...) holds; what the machine
says (DBQUEUE_* variables, dbqueue.toml) does not. When the case ends its processes are killed, its fakes are gone, and
the queue is what it was.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import sqlalchemy

from dbqueue import clock, settings
from dbqueue.database.engine import parse_url
from dbqueue.errors import Closed, InvalidArgument, JobNotFound, NotSupported
from dbqueue.queue import DBQueue
from dbqueue.runtime.context import Port
from dbqueue.settings import JobSettings
from dbqueue.targets import MAX_DELAY, JobRef, Target
from dbqueue.testing.deployment import hidden
from dbqueue.testing.drain import Drained, drain
from dbqueue.testing.process import Process, ProcessTrouble, start
from dbqueue.testing.shared_clock import SharedClock
from dbqueue.views import JobRecord

T = TypeVar("T")

LOOK_EVERY_S = 0.005

_FINISHED = ("succeeded", "dead", "cancelled", "acked", "discarded")


class Case:
    """Made by ``case(queue)``. ``url`` and ``path`` are its database, where an application's own tables may live beside
    dbqueue's, so that ``using(...)`` can join; ``folder`` is empty but for that and is gone with the case (under
    pytest: kept as ``tmp_path`` is)."""

    def __init__(self, queue: DBQueue, folder: Path, job_settings: JobSettings, stack: ExitStack) -> None:
        self.queue, self.folder = queue, folder
        self.path, self.url = folder / DATABASE, str(job_settings.url)
        self._settings, self._stack = job_settings, stack
        self._database = queue.database
        self._processes: list[Process] = []
        self._ended = False

    # -- time --------------------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The time of the case's database, as every lease and run_at is compared with it."""
        self._check()
        return clock.to_datetime(self._database.read(self._database.dialect.now))

    def advance(self, seconds: float) -> datetime:
        """Moves the clock on, for the case's processes too, and returns the new ``now()``. Delayed and retried jobs
        become due by it, and leases end. Time goes on by itself as well; it never goes back."""
        self._check()
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= MAX_DELAY:
            raise InvalidArgument(f"advance() takes seconds from 0 to {MAX_DELAY}; got {settings.describe(seconds)}")
        self._database.clock.advance(seconds)
        return self.now()

    # -- work --------------------------------------------------------------------------------------------------------

    def drain(
        self, max_jobs: int = 100, *, slots: int = 1, queues: tuple[str, ...] | None = None, raise_errors: bool = False
    ) -> Drained:
        """Runs what is due, and what becomes due by that, until nothing is, and says how each attempt ended.

        A real worker does it, in this thread, with ``slots`` slot threads: one gives an order that is always the same.
        ``queues``: only these. Raises NotDrained when more than ``max_jobs`` were due, NotSupported inside
        ``using(...)`` or beside an open write transaction; with ``raise_errors`` the first exception that a handler
        raised, once everything has run."""
        self._check()
        if isinstance(max_jobs, bool) or not isinstance(max_jobs, int) or max_jobs < 1:
            raise InvalidArgument(f"drain(max_jobs=...) takes an int from 1; got {settings.describe(max_jobs)}")
        return drain(self.queue, max_jobs=max_jobs, slots=slots, queues=queues, raise_errors=raise_errors)

    def process(self, app: str, *options: str) -> Process:
        """Starts a real ``dbqueue worker -A app`` on the case's database, with more ``options`` of that command; it is
        killed when the case ends. ``app`` is the queue's ``module:attribute``, found on the path of this process. Fakes
        do not reach into it."""
        self._check()
        process = start(app, options, self._settings, self.folder, len(self._processes) + 1)
        self._processes.append(process)
        self._stack.callback(process.end)
        return process

    def wait_for(self, job: JobRef | UUID, *states: str, within: float = 20.0) -> JobRecord:
        """Waits until a process of this case has brought the job into one of ``states`` ("succeeded" if none is given),
        and returns its record. Raises ProcessTrouble, with the processes' log, as soon as that cannot happen any more,
        or after ``within`` seconds."""
        wanted, until = states or ("succeeded",), time.monotonic() + within
        while True:
            alive = any(process.running for process in self._processes)  # asked first: its last act may be this job
            record = self.job(job)
            if record.state in wanted:
                return record
            if not alive:
                reason = "no process of this case is running"
            elif record.state in _FINISHED:
                reason = "it has ended"
            elif time.monotonic() >= until:
                reason = f"waited {within:g} s"
            else:
                time.sleep(LOOK_EVERY_S)  # another process works: there is nothing here to wait on
                continue
            log = "\n".join(process.log for process in self._processes)
            raise ProcessTrouble(f"job {record.id} is {record.state}, not {' or '.join(wanted)}; {reason}\n{log}")

    # -- looking -----------------------------------------------------------------------------------------------------

    def job(self, job: JobRef | UUID) -> JobRecord:
        """The job's record, with its payload where that is kept. Raises JobNotFound."""
        self._check()
        job_id = job.id if isinstance(job, JobRef) else job
        record = self.queue.get_job(job_id, with_payload=True)
        if record is None:
            raise JobNotFound(f"there is no job {job_id} in this case")
        return record

    def jobs(
        self, *, state: str | None = None, target: Target[Any] | str | None = None, queue: str | None = None,
        key: str | None = None,
    ) -> list[JobRecord]:  # fmt: skip
        """All jobs that match everything given, finished ones too, those changed last first."""
        self._check()
        name = target.name if isinstance(target, Target) else target
        return self.queue.jobs(state=state, target=name, queue=queue, key=key, limit=100_000)

    # -- fakes -------------------------------------------------------------------------------------------------------

    def fake(self, port: Port[T], fake: T) -> AbstractContextManager[T]:
        """From now on ``port.get()`` answers ``fake``, until the case ends or, in ``with case.fake(...):``, the
        block."""
        return self._replaced({port: fake}, fake)

    def fakes(self, fakes: Mapping[Port[Any], Any]) -> AbstractContextManager[Mapping[Port[Any], Any]]:
        """``fake`` for several ports at once: ``case.fakes({mailer: FakeMailer(), clock: FakeClock()})``."""
        return self._replaced(fakes, fakes)

    def _replaced(self, fakes: Mapping[Port[Any], Any], value: T) -> AbstractContextManager[T]:
        self._check()
        until = ExitStack()
        for port, fake in fakes.items():
            until.enter_context(port.replaced(fake))
        self._stack.callback(until.close)
        return _undone(until, value)

    def _check(self) -> None:
        if self._ended:
            raise Closed("this case has ended")
        if self.queue.database is not self._database:
            raise NotSupported("this case's queue leads to another case, which was opened later; end that one first")

    def __repr__(self) -> str:
        return f"<Case {self.path}>"


CaseFactory = Callable[[DBQueue], Case]
"""What the fixture ``dbqueue_case`` is."""

DATABASE = "case.db"


@contextmanager
def case(queue: DBQueue, tmp_path: str | PathLike[str] | None = None) -> Iterator[Case]:
    """Opens a case for ``queue``. Its folder is a new one below ``tmp_path`` and is left there; without ``tmp_path`` it
    is removed.

    Several queues may have their cases at the same time, and one queue may have a case within a case."""
    if not isinstance(queue, DBQueue):
        raise InvalidArgument(f"case() takes a DBQueue; got {type(queue).__name__}")
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dbqueue-", dir=tmp_path))
        if tmp_path is None:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(hidden())
        job_settings = _settings(queue, folder / DATABASE)
        stack.enter_context(queue.rebound(job_settings, SharedClock(folder / "clock")))
        queue.migrate()
        opened = Case(queue, folder, job_settings, stack)
        try:
            yield opened
        finally:
            opened._ended = True


def _settings(queue: DBQueue, path: Path) -> JobSettings:
    rules = settings.TABLES["jobs"]
    url = sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)
    if parse_url(url).database != str(path):  # SQLAlchemy 2.0 escapes nothing
        raise InvalidArgument("no database URL can name a file below this tmp_path; one without ? and % can be named")
    return replace(
        JobSettings.from_options(**queue.options),
        url=url,
        listen_url=None,
        lease_ms=rules["lease_ms"].high,
        history_ms=rules["history_ms"].high,  # an advanced clock must not prune what a test looks at
    )


@contextmanager
def _undone(until: ExitStack, value: T) -> Iterator[T]:
    try:
        yield value
    finally:
        until.close()
