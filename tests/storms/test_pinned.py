"""What a job costs in a large queue while somebody holds a snapshot: no more than in a small one, in rows that the database reads."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue, RetryLater, current_job
from dbqueue.database.dialect import OwnSession
from dbqueue.database.marks import Marks
from dbqueue.database.postgres import Postgres
from dbqueue.database.sqlite import CHECKPOINT_CHANGES, SqliteSession
from tests.runtimes.lab import drained
from tests.storms.crowd import claim_plans, fill_history, fill_jobs, hold_snapshot, rows_read
from tests.waiting import wait_for

SLOTS = 16
sizes = pytest.mark.parametrize(
    ("size", "work"),
    [
        pytest.param(50_000, 10_000, id="small"),
        pytest.param(1_000_000, 60_000, id="great", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)


@dataclass(frozen=True)
class Drop:
    again: bool = False


class Crowd:
    """A queue that counts its runs. In a ``large`` one there are ``size`` jobs before and beside those that are drained, half as many
    of a better priority that are not due yet, and a long history; and a snapshot is held over all of it from then on. Half of the
    work becomes due while it is drained, and a half of that runs twice."""

    def __init__(self, url: str, stack: ExitStack, work: int, size: int = 0) -> None:
        self.queue = stack.enter_context(closing(DBQueue(url)))
        self.runs = 0

        @self.queue.job(max_attempts=5, timeout=20, name="drop")
        def drop(drop: Drop) -> None:
            self.runs += 1
            job = current_job()
            if drop.again and job is not None and job.attempt == 1:
                raise RetryLater(delay=0.05)

        database = self.queue.database
        database.ready()
        fill_jobs(database, drop, "p", size or work, once=Drop())
        if size:
            fill_jobs(database, drop, "f", size // 2, priority=5, first=1e6, step=0.001, once=Drop())
            fill_history(database, drop, size)
            if isinstance(database.dialect, Postgres):
                with database.session() as session:
                    session.execute("VACUUM ANALYZE dbqueue_jobs")
            stack.callback(hold_snapshot(database).close)
        self._target, self._work, self._letters = drop, work, iter("abcde")

    def drain(self) -> int:
        """One worker takes so many jobs; returns how many attempts ran."""
        before = self.runs
        fill_jobs(
            self.queue.database, self._target, next(self._letters), self._work // 2, priority=1, first=0.1, step=2e-4,
            once=Drop(), twice=Drop(again=True),
        )  # fmt: skip
        drained(self.queue, slots=SLOTS, max_jobs=self._work)
        return self.runs - before


@sizes
@pytest.mark.req("D11", "D12")
@pytest.mark.databases("postgres")
def test_rows_read_beside_a_held_snapshot(
    make_database_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, size: int, work: int
) -> None:
    """What a worker reads is of two kinds: what it takes, at its marks, which must not grow with what the snapshot keeps; and sweeps
    over all of it, which may take a share of the time. So it works once as ever, and once more with sweeps as rare as can be."""
    with ExitStack() as stack:
        crowd = Crowd(make_database_url(), stack, work, size)
        own = crowd.queue.database.open_session()
        stack.callback(own.close)
        sweeps, swept = [], Marks.swept

        def timed(marks: Marks, probe: str, began: float) -> None:
            sweeps.append(time.monotonic() - began)
            swept(marks, probe, began)

        monkeypatch.setattr(Marks, "swept", timed)
        began = time.monotonic()
        crowd.drain()
        share = sum(sweeps) / (time.monotonic() - began)
        print(f"{len(sweeps)} sweeps, share {share:.2f}, longest {max(sweeps):.3f}")
        assert share <= 0.3, "there are two kinds of sweeps, and each may have a twentieth of the time"

        monkeypatch.setattr(Marks, "SHARE", 1_000_000)
        monkeypatch.setattr(Marks, "CHEAP", 0.0)
        before = _settled_rows(own)
        attempts = crowd.drain()
        read = {name: (count - before[name]) / attempts for name, count in _settled_rows(own).items()}
        print(size, attempts, read)
        # A claim that began with the first entry of its index would read every job done so far: thousands for each.
        assert read["rows"] <= 12, read
        assert read["claim"] <= 50, read
        assert read["waiting"] <= 400, read
        assert read["lease"] <= 20, read
        plans = claim_plans(crowd.queue.database, SLOTS)
    pages = {kind: plan.pages for kind, plan in plans.items()}
    print(pages)
    assert all(plan.rows_read <= 4 * SLOTS for plan in plans.values())
    assert pages["marked"] <= 20 * SLOTS
    assert pages["sweep"] > pages["marked"], "nothing was kept in the index: this test proves nothing"


def _settled_rows(own: OwnSession) -> dict[str, int]:
    """When the worker's connections have ended, and told what they read: ours, the snapshot's and the pool's are left."""
    alone = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'dbqueue'"
    wait_for(lambda: own.execute(alone)[0][0] <= 3)
    return rows_read(own)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the steps of SQLite's machine on connections that are made from now on, in hundreds."""
    counted = [0]
    connect = sqlite3.connect

    def count() -> int:
        counted[0] += 1
        return 0

    def counting(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.set_progress_handler(count, 100)
        return connection

    monkeypatch.setattr(sqlite3, "connect", counting)
    return counted


@sizes
@pytest.mark.req("D11", "D12")
@pytest.mark.databases("sqlite")
def test_steps_beside_a_held_snapshot(
    make_database_url: Callable[[], str], steps: list[int], size: int, work: int
) -> None:
    costs = {}
    for name, large in (("small", 0), ("large", size)):
        with ExitStack() as stack:
            crowd = Crowd(make_database_url(), stack, work, large)
            before = steps[0]
            attempts = crowd.drain()
            costs[name] = 100 * (steps[0] - before) / attempts
    print(size, costs)
    assert costs["large"] <= 1.5 * costs["small"], costs


@pytest.mark.req("D11")
@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("pinned", [False, True])
def test_checkpoints_of_a_worker(
    make_database_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """SQLite's own way would be one after each commit as soon as the log is long: in vain while a snapshot is held from before the
    log, and dearer each time, since it sorts the whole log first. The worker's are few, and keep the log short where they can."""
    tries, checkpoint = [0], SqliteSession._checkpoint

    def counted(session: SqliteSession) -> None:
        tries[0] += 1
        assert session.execute("PRAGMA wal_autocheckpoint") == [(0,)]
        checkpoint(session)

    monkeypatch.setattr(SqliteSession, "_checkpoint", counted)
    url, work = make_database_url(), 8_000
    with ExitStack() as stack:
        crowd = Crowd(url, stack, work)
        if pinned:
            with crowd.queue.database.session() as session:
                session.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            stack.callback(hold_snapshot(crowd.queue.database).close)
        other = crowd.queue.database.open_session()  # whoever closes the last connection removes the log
        stack.callback(other.close)
        other.execute("SELECT 1 FROM dbqueue_jobs LIMIT 1")
        attempts = crowd.drain()
        size = Path(url.removeprefix("sqlite:///") + "-wal").stat().st_size / 1e6
    print(attempts, "attempts", tries[0], "checkpoints", size, "MB")
    # Each attempt changes four or five rows, in a claim and a settle.
    assert 1 <= tries[0] <= 5 * attempts / CHECKPOINT_CHANGES + 1
    assert pinned or size <= 25
