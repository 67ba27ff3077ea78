"""Ownership is decided by a clock that is read after the lock is held (D13).

A second connection holds the row, or on SQLite the write lock, while the lease ends; then it rolls back, renews, takes the job
over or deletes it. Meanwhile PostgreSQL answers "busy" at once; afterwards every verb says the truth, and the other jobs of the
batch never suffer.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import Fact, Turn
from dbqueue.errors import DatabaseBusy
from dbqueue.ids import new_token
from dbqueue.states import Kind, State
from tests.factory import LEASE, Job, claim_turn, joined_to, make, now, rows, run_together, set_columns
from tests.waiting import wait_for

PATIENCE = 2.0
"""Seconds that an answer may take while somebody else holds a row."""

LONG = 100 * LEASE


def _settle(*settlement: Any, **more: Any) -> Callable[[Database, OwnSession, list[Job]], list[Fact]]:
    def ask(db: Database, session: OwnSession, jobs: list[Job]) -> list[Fact]:
        return db.run(lambda s: db.dialect.settle(s, [job.settlement(*settlement, **more) for job in jobs]))

    return ask


def _settle_in_turn(*settlement: Any, **more: Any) -> Callable[[Database, OwnSession, list[Job]], list[Fact]]:
    def ask(db: Database, session: OwnSession, jobs: list[Job]) -> list[Fact]:
        return db.dialect.turn(session, Turn([job.settlement(*settlement, **more) for job in jobs])).settled

    return ask


def _renew(db: Database, session: OwnSession, jobs: list[Job]) -> list[Fact]:
    return db.run(lambda s: db.dialect.renew(s, [job.held for job in jobs], LEASE))


def _renew_in_turn(db: Database, session: OwnSession, jobs: list[Job]) -> list[Fact]:
    return db.dialect.turn(session, Turn(renewals=[job.held for job in jobs], lease=LEASE)).renewed


WAYS: dict[str, Any] = {
    "fast": _settle_in_turn(State.SUCCEEDED),
    "succeed": _settle(State.SUCCEEDED),
    "ack in turn": _settle_in_turn(State.ACKED),
    "retry later": _settle(State.PENDING, Kind.FAILED, delay=5_000_000),
    "block": _settle_in_turn(State.BLOCKED, Kind.UNKNOWN_TARGET),
    "bury": _settle(State.DEAD, Kind.FAILED),
    "renew": _renew,
    "renew in turn": _renew_in_turn,
}
WON = (Fact.DONE, Fact.AGAIN, Fact.RENEWED)
every_way = pytest.mark.parametrize("way", WAYS)
postgres_only = pytest.mark.databases("postgres", "postgres15")


def ask(way: str, db: Database, session: OwnSession, jobs: list[Job]) -> list[Fact]:
    began = time.monotonic()
    facts: list[Fact] = WAYS[way](db, session, jobs)
    assert time.monotonic() - began < PATIENCE
    return facts


@contextmanager
def row_lock(db: Database, job: Job) -> Iterator[psycopg.Connection]:
    """A stranger's transaction that holds the job's row; it ends as the block wishes."""
    with psycopg.connect(db.url.render_as_string(hide_password=False)) as holder:
        found = holder.execute("SELECT 1 FROM dbqueue_jobs WHERE id = %s FOR UPDATE", (job.id.hex(),)).fetchall()
        assert len(found) == 1
        yield holder


# -- PostgreSQL: one row ------------------------------------------------------------------------------------------------


@postgres_only
@pytest.mark.req("D13", "H14")
@every_way
def test_a_lock_that_outlives_the_lease_and_rolls_back(db: Database, session: OwnSession, way: str) -> None:
    before, held, after = (make(db, State.RUNNING, lease_until=now(db) + lease) for lease in (LONG, LEASE, LONG))
    with row_lock(db, held) as holder:
        db.clock.advance(61)
        facts = ask(way, db, session, [before, held, after])
        # The fast path counts, and asks again for the facts.
        assert [fact in WON or (way == "fast" and fact is Fact.ALREADY) for fact in facts] == [True, False, True]
        assert facts[1] is Fact.BUSY
        assert ask(way, db, session, [held]) == [Fact.BUSY]
        holder.rollback()
    unchanged = rows(db)
    assert ask(way, db, session, [held]) == [Fact.LOST]
    assert rows(db) == unchanged
    assert unchanged.jobs[held.id] == held.row


@postgres_only
@pytest.mark.req("D13")
@every_way
def test_a_lock_that_ends_within_the_lease(db: Database, session: OwnSession, way: str) -> None:
    job = make(db, State.RUNNING)
    with row_lock(db, job) as holder:
        assert ask(way, db, session, [job]) == [Fact.BUSY]
        assert rows(db).jobs[job.id] == job.row
        holder.rollback()
    assert ask(way, db, session, [job])[0] in WON


@postgres_only
@pytest.mark.req("D13", "H14")
@every_way
@pytest.mark.parametrize("late", [0, 62])
def test_a_renewal_under_the_lock_counts_from_its_commit(
    db: Database, session: OwnSession, way: str, late: float
) -> None:
    job = make(db, State.RUNNING)
    with row_lock(db, job) as holder:
        db.clock.advance(59)
        until = now(db) + LEASE
        holder.execute("UPDATE dbqueue_jobs SET lease_until = %s WHERE id = %s", (until, job.id.hex()))
        db.clock.advance(2)
        assert ask(way, db, session, [job]) == [Fact.BUSY]
        holder.commit()
    db.clock.advance(late)
    fact = ask(way, db, session, [job])[0]
    assert fact is Fact.LOST if late else fact in WON


@postgres_only
@pytest.mark.req("D12", "D13")
@every_way
def test_a_takeover_under_the_lock(db: Database, session: OwnSession, way: str) -> None:
    other, job = make(db, State.RUNNING), make(db, State.RUNNING)
    token = new_token()
    with row_lock(db, job) as holder:
        holder.execute(
            "UPDATE dbqueue_jobs SET token = %s, attempt = attempt + 1, lease_until = %s, worker = 'other' WHERE id = %s",
            (token.hex(), now(db) + LONG, job.id.hex()),
        )
        assert ask(way, db, session, [job]) == [Fact.BUSY]
        holder.commit()
    taken = rows(db).jobs[job.id]
    facts = ask(way, db, session, [other, job])
    assert facts[0] in WON or (way == "fast" and facts[0] is Fact.ALREADY)
    assert facts[1] is Fact.LOST
    assert rows(db).jobs[job.id] == taken
    assert ask(way, db, session, [Job(job.id, token, job.row)])[0] in WON


@postgres_only
@pytest.mark.req("D13")
@every_way
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_deletion_under_the_lock(db: Database, session: OwnSession, way: str, cancelled: bool) -> None:
    job = make(db, State.RUNNING)
    with row_lock(db, job) as holder:
        if cancelled:
            assert db.dialect.cancel(joined_to(db, holder), job.id).moved
        else:
            holder.execute("DELETE FROM dbqueue_jobs WHERE id = %s", (job.id.hex(),))
        assert ask(way, db, session, [job]) == [Fact.BUSY]
        holder.commit()
    ended = rows(db)
    assert ask(way, db, session, [job]) == [Fact.LOST]
    assert rows(db) == ended
    assert ended.state(job.id) is (State.CANCELLED if cancelled else None)


# -- PostgreSQL: many ---------------------------------------------------------------------------------------------------


@postgres_only
@pytest.mark.req("D13")
def test_every_outcome_in_one_batch_beside_a_held_row(db: Database, session: OwnSession) -> None:
    """The rows around a held one are settled, renewed and claimed in the same turn, whatever becomes of them."""
    held, done, again, lost = (make(db, State.RUNNING) for _ in range(4))
    kept, held_too, ready = make(db, State.RUNNING), make(db, State.RUNNING), make(db)
    with row_lock(db, held), row_lock(db, held_too):
        result = db.dialect.turn(
            session,
            replace(
                claim_turn(4),
                settlements=[
                    held.settlement(State.SUCCEEDED),
                    done.settlement(State.ACKED),
                    again.settlement(State.PENDING, Kind.FAILED, delay=5_000_000),
                    Job(lost.id, new_token(), lost.row).settlement(State.SUCCEEDED),
                ],
                renewals=[kept.held, held_too.held],
            ),
        )
    assert result.settled == [Fact.BUSY, Fact.DONE, Fact.AGAIN, Fact.LOST]
    assert result.renewed == [Fact.RENEWED, Fact.BUSY]
    assert [row.id for row in result.claimed] == [ready.id]


@postgres_only
@pytest.mark.req("D11", "D13")
def test_a_claim_passes_by_what_others_hold(db: Database, session: OwnSession) -> None:
    first, second = make(db), make(db)
    with row_lock(db, first) as holder:
        began = time.monotonic()
        assert [row.id for row in db.dialect.turn(session, claim_turn(4)).claimed] == [second.id]
        assert time.monotonic() - began < PATIENCE
        holder.rollback()
    wait_for(lambda: session.marks.sweep_due("claim"))  # type: ignore[attr-defined]
    assert [row.id for row in db.dialect.turn(session, claim_turn(4)).claimed] == [first.id]


@postgres_only
@pytest.mark.req("D11", "D13")
def test_upkeep_and_release_pass_by_what_others_hold(db: Database, session: OwnSession) -> None:
    waiting = [make(db, run_at=now(db) + LEASE) for _ in range(2)]
    running = [make(db, State.RUNNING, worker="me") for _ in range(2)]
    db.clock.advance(61)
    with row_lock(db, waiting[0]), row_lock(db, running[0]):
        began = time.monotonic()
        due = db.dialect.upkeep(session, 10, ("default",))
        assert (due.promoted, due.again) == (1, 1)
        set_columns(db, running[1].id, state=1, token=new_token(), lease_until=now(db) + LEASE, ready_at=None)
        assert db.dialect.release_unknown(session, "me", []) == 1
        assert time.monotonic() - began < PATIENCE
    wait_for(lambda: session.marks.sweep_due("upkeep"))  # type: ignore[attr-defined]
    due = db.dialect.upkeep(session, 10, ("default",))
    assert (due.promoted, due.again) == (1, 1)


@postgres_only
@pytest.mark.req("D13")
def test_two_batches_in_opposite_orders_do_not_deadlock(db: Database) -> None:
    """Both lock in the order of ids, and neither waits."""
    jobs = [make(db, State.RUNNING) for _ in range(200)]
    facts: dict[str, list[Fact]] = {}

    def renew(name: str, batch: list[Job]) -> None:
        with db.session() as own:
            for _ in range(20):
                facts[name] = db.dialect.renew(own, [job.held for job in batch], LEASE)

    run_together([lambda: renew("up", jobs), lambda: renew("down", jobs[::-1])])
    assert set(facts["up"] + facts["down"]) <= {Fact.RENEWED, Fact.BUSY}


# -- SQLite: the one write lock -----------------------------------------------------------------------------------------


@contextmanager
def write_lock(db: Database) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(str(db.url.database), isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield holder
        if holder.in_transaction:
            holder.execute("ROLLBACK")


class Waiting:
    """A verb in a thread of its own, on a connection that lets us see how often it asked for the lock."""

    def __init__(self, db: Database, ask: Callable[[Any], list[Fact]]) -> None:
        self._db, self._ask = db, ask
        self.tries = 0
        self.facts: list[Fact] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with closing(self._db.open_session()) as session:
            session.connection.set_trace_callback(self._trace)
            self.facts = self._ask(session)

    def _trace(self, statement: str) -> None:
        self.tries += statement == "BEGIN IMMEDIATE"

    def __enter__(self) -> Waiting:
        self._thread.start()
        wait_for(lambda: self.tries >= 3)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


SQLITE_WAYS: dict[str, Callable[[Database, Any, list[Job]], list[Fact]]] = {
    "settle": lambda db, s, jobs: in_transaction(
        s, lambda: db.dialect.settle(s, [j.settlement(State.ACKED) for j in jobs])
    ),
    "renew": lambda db, s, jobs: in_transaction(s, lambda: db.dialect.renew(s, [j.held for j in jobs], LEASE)),
    "fast": lambda db, s, jobs: (
        db.dialect.turn(s, Turn([j.settlement(State.SUCCEEDED) for j in jobs], lease=LONG)).settled
    ),
    "turn": lambda db, s, jobs: (
        db.dialect.turn(s, Turn([j.settlement(State.PENDING) for j in jobs], lease=LONG)).settled
    ),
    "renew in turn": lambda db, s, jobs: db.dialect.turn(s, Turn(renewals=[j.held for j in jobs], lease=LONG)).renewed,
}


def in_transaction(session: OwnSession, verb: Callable[[], list[Fact]]) -> list[Fact]:
    session.begin()
    facts = verb()
    session.commit()
    return facts


@pytest.mark.databases("sqlite")
@pytest.mark.req("D11", "D13", "H14")
@pytest.mark.parametrize("way", SQLITE_WAYS)
def test_a_write_lock_that_outlives_the_lease(db: Database, way: str) -> None:
    expiring, lasting = make(db, State.RUNNING), make(db, State.RUNNING, lease_until=now(db) + LONG)

    def ask_both(session: OwnSession) -> list[Fact]:
        return SQLITE_WAYS[way](db, session, [expiring, lasting])

    with write_lock(db) as holder, Waiting(db, ask_both) as waiting:
        db.clock.advance(61)
        holder.execute("ROLLBACK")
    assert waiting.facts[0] is Fact.LOST
    assert waiting.facts[1] in WON
    assert rows(db).jobs[expiring.id] == expiring.row


@pytest.mark.databases("sqlite")
@pytest.mark.req("D13")
@pytest.mark.parametrize("way", SQLITE_WAYS)
@pytest.mark.parametrize("what", ["renewed", "taken over", "deleted"])
def test_what_was_committed_while_a_verb_waited_for_the_write_lock(db: Database, way: str, what: str) -> None:
    job = make(db, State.RUNNING)
    statement, values = {
        "renewed": ("UPDATE dbqueue_jobs SET lease_until = lease_until + ? WHERE id = ?", (LONG, job.id)),
        "taken over": ("UPDATE dbqueue_jobs SET token = ? WHERE id = ?", (new_token(), job.id)),
        "deleted": ("DELETE FROM dbqueue_jobs WHERE state = ? AND id = ?", (1, job.id)),
    }[what]
    with write_lock(db) as holder:
        holder.execute(statement, values)
        with Waiting(db, lambda session: SQLITE_WAYS[way](db, session, [job])) as waiting:
            db.clock.advance(61 if what == "renewed" else 0)
            holder.execute("COMMIT")
    assert len(waiting.facts) == 1
    assert waiting.facts[0] in WON if what == "renewed" else waiting.facts[0] is Fact.LOST


@pytest.mark.databases("sqlite")
@pytest.mark.req("D14")
def test_a_turn_gives_up_in_time_to_renew(db: Database, session: OwnSession) -> None:
    job = make(db, State.RUNNING)
    began = time.monotonic()
    with write_lock(db), pytest.raises(DatabaseBusy), db.errors():
        db.dialect.turn(session, Turn([job.settlement(State.SUCCEEDED)], lease=400_000))
    assert 0.1 <= time.monotonic() - began < 0.4
    assert not session.connection.in_transaction
    assert db.dialect.turn(session, Turn([job.settlement(State.SUCCEEDED)])).settled == [Fact.DONE]
