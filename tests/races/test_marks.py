"""PostgreSQL: a worker starts looking at low-water marks, and yet no job stays behind one.

What can land behind a mark: rows of a transaction that committed late, rows that were locked by somebody who rolled back,
everything new after the database's clock stepped back, and jobs in a lane (queue and priority) where this worker never claimed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from dbqueue.clock import SECOND
from dbqueue.database.engine import Database
from dbqueue.database.marks import Marks
from dbqueue.database.postgres import PostgresSession
from dbqueue.database.tables import ClaimedRow
from dbqueue.states import State
from tests.factory import LEASE, claim_turn, joined_to, make, new_job, now, rows
from tests.waiting import wait_for

pytestmark = pytest.mark.databases("postgres", "postgres15")

HOUR = 3600.0


def enqueue(db: Database, count: int = 1, **columns: object) -> list[bytes]:
    jobs = [new_job(**columns) for _ in range(count)]
    return [answer.id for answer in db.run(lambda session: db.dialect.enqueue_many(session, jobs))]


def claim(db: Database, session: PostgresSession, limit: int = 1) -> list[bytes]:
    return [row.id for row in _claim(db, session, limit)]


def _claim(db: Database, session: PostgresSession, limit: int) -> list[ClaimedRow]:
    return db.dialect.turn(session, claim_turn(limit)).claimed


def without_budget(session: PostgresSession) -> None:
    """As after a sweep that was dear: until the next one only the marks are looked at."""
    for probe in ("claim", "upkeep"):
        session.marks._next[probe] = time.monotonic() + 60
        session.marks._cost[probe] = 60.0


def set_marks(db: Database, session: PostgresSession) -> None:
    """Claims something, so that the marks stand close to now."""
    enqueue(db, 2)
    db.clock.advance(1)
    assert len(claim(db, session, 2)) == 2
    db.dialect.upkeep(session, 10, ("default",))
    assert session.marks.lanes
    assert session.marks.waiting
    assert session.marks.lease


@contextmanager
def late_transaction(db: Database, **columns: object) -> Iterator[tuple[bytes, psycopg.Connection]]:
    """A caller's transaction with one job in it, that takes its time to commit."""
    with psycopg.connect(db.url.render_as_string(hide_password=False)) as connection:
        job = new_job(**columns)
        db.dialect.enqueue(joined_to(db, connection), job)
        yield job.id, connection


# -- a clock that steps back -------------------------------------------------------------------------------------------


@pytest.mark.req("D12", "H14")
def test_after_the_clock_stepped_back_claims_find_everything(db: Database, session: PostgresSession) -> None:
    set_marks(db, session)
    before = enqueue(db, 3)
    without_budget(session)
    db.clock.advance(-HOUR)
    after = enqueue(db, 3)
    assert sorted(claim(db, session, 4) + claim(db, session, 4)) == sorted(before + after)


@pytest.mark.req("D12", "H14")
def test_after_the_clock_stepped_back_upkeep_finds_everything(db: Database, session: PostgresSession) -> None:
    set_marks(db, session)
    without_budget(session)
    db.clock.advance(-HOUR)
    waiting = enqueue(db, 2, delay=SECOND)
    leased = make(db, State.RUNNING, lease_until=now(db) + SECOND)
    db.clock.advance(5)
    promoted = expired = 0
    for _ in range(2):  # the first one sees the step, the second one looks at everything
        due = db.dialect.upkeep(session, 10, ("default",))
        promoted, expired = promoted + due.promoted, expired + due.again
    assert (promoted, expired) == (2, 1)
    found = rows(db).jobs
    assert all(found[job_id]["ready_at"] for job_id in [*waiting, leased.id])


@pytest.mark.req("D12", "H14")
def test_a_step_there_and_back_between_two_looks_only_delays(db: Database, session: PostgresSession) -> None:
    """The worker never saw the earlier clock, so what was written then lies behind its marks: the sweep finds it."""
    set_marks(db, session)
    db.clock.advance(-HOUR)
    ready, waiting = enqueue(db, 2), enqueue(db, 2, delay=SECOND)
    db.clock.advance(HOUR + 2)
    wait_for(lambda: db.dialect.upkeep(session, 10, ("default",)).promoted == 2)
    found: list[bytes] = []

    def complete() -> bool:
        found.extend(claim(db, session, 4))
        return len(found) == 4

    wait_for(complete)
    assert sorted(found) == sorted(ready + waiting)


# -- late commits ------------------------------------------------------------------------------------------------------


@pytest.mark.req("D5", "D11")
def test_an_idle_worker_finds_a_late_commit_at_its_next_look(db: Database, session: PostgresSession) -> None:
    with late_transaction(db) as (late, connection):
        set_marks(db, session)
        assert claim(db, session) == []
        assert session.marks.lanes["default", 9] > (now(db) - 2 * SECOND, late)
        connection.commit()
    # Its next look is a poll away; the sweep's budget allows one long before that.
    wait_for(lambda: session.marks.sweep_due("claim"), deadline=0.25)
    assert claim(db, session) == [late]


@pytest.mark.req("D5", "D11")
def test_a_busy_worker_finds_a_late_commit_within_seconds(db: Database, session: PostgresSession) -> None:
    """Its claims are always full, so only the sweep's share of time lets it look behind the marks."""
    with late_transaction(db) as (late, connection):
        set_marks(db, session)
        make(db, priority=9)
        enqueue(db, 2_000)
        assert len(claim(db, session, 1)) == 1
        connection.commit()
    began, found, claims = time.monotonic(), False, 0
    while not found:
        rows_ = claim(db, session, 1)
        assert len(rows_) == 1, "the supply ended before the late job was found"
        found, claims = rows_ == [late], claims + 1
        assert time.monotonic() - began < 5
    assert claims > 1  # it was behind the mark


@pytest.mark.req("D12")
@pytest.mark.parametrize("kind", ["waiting", "lease"])
def test_upkeep_finds_what_was_committed_or_released_late(db: Database, session: PostgresSession, kind: str) -> None:
    job = make(db, run_at=now(db) + LEASE) if kind == "waiting" else make(db, State.RUNNING)
    with psycopg.connect(db.url.render_as_string(hide_password=False)) as holder:
        holder.execute("SELECT 1 FROM dbqueue_jobs WHERE id = %s FOR UPDATE", (job.id.hex(),))
        db.clock.advance(62)
        due = db.dialect.upkeep(session, 10, ("default",))
        assert (due.promoted, due.again) == (0, 0)
        assert session.marks.lease == session.marks.waiting > job.row["run_at" if kind == "waiting" else "lease_until"]
        holder.rollback()

    def swept() -> bool:
        due = db.dialect.upkeep(session, 10, ("default",))
        return due.promoted + due.again == 1

    wait_for(swept, deadline=5)


@pytest.mark.req("D11")
def test_a_lane_without_a_mark_is_not_overlooked(db: Database, session: PostgresSession) -> None:
    """Few jobs behind the marks are followed by a look at everything, before the worker believes that it may sleep."""
    set_marks(db, session)
    other = enqueue(db, 2, priority=4)
    more = enqueue(db)
    session.marks._next["claim"] = time.monotonic() + 60
    assert sorted(claim(db, session, 4)) == sorted(other + more)


@pytest.mark.req("D11")
def test_a_claim_that_got_all_it_asked_for_is_not_followed_by_another(
    db: Database, session: PostgresSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim for 100 free slots asks for 96, the next smaller size: 96 are not few."""
    set_marks(db, session)
    enqueue(db, 300)
    db.clock.advance(1)
    asked: list[int] = []
    launch = session.launch

    def count(*steps: object) -> object:
        asked.append(len(steps))
        return launch(*steps)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "launch", count)
    assert len(claim(db, session, 100)) == 96
    assert asked == [1]
    assert len(claim(db, session, 100)) == 96
    assert len(claim(db, session, 300)) == 108
    assert asked[:2] == [1, 1]


# -- the budget --------------------------------------------------------------------------------------------------------


def test_a_sweep_costs_a_twentieth_of_the_time_at_most() -> None:
    marks = Marks()
    assert marks.sweep_due("claim")
    began = time.monotonic() - 2
    marks.swept("claim", began)
    assert marks._next["claim"] - began < 3  # one alone was bad luck
    marks.swept("claim", began)
    assert not marks.sweep_due("claim")
    assert not marks.may_look("claim")
    assert marks.sweep_due("upkeep")
    assert marks._next["claim"] - began >= 2 + 20 * 2
    marks.saw(2)
    marks.saw(1)
    assert marks.sweep_due("claim")


def test_a_mark_stays_behind_now_by_the_lag() -> None:
    marks = Marks()
    marks.saw(10 * SECOND)
    marks.claimed("q", 9, 3 * SECOND, b"\x01" * 16)
    assert marks.lanes_of(["q"]) == [("q", 9, 3 * SECOND, b"\x01" * 16)]
    marks.claimed("q", 9, 10 * SECOND, b"\x02" * 16)
    assert marks.lanes_of(["q", "other"]) == [("q", 9, 10 * SECOND - Marks.LAG, bytes(16))]
    marks.claimed("q", 9, 2 * SECOND, b"\x03" * 16)
    marks.claimed("q", 0, 2 * SECOND, b"\x03" * 16)
    assert [lane[:3] for lane in marks.lanes_of(["q"])] == [("q", 0, 2 * SECOND), ("q", 9, 10 * SECOND - Marks.LAG)]
