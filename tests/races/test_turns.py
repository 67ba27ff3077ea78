"""A worker's turn is one transaction, whatever happens in it, and several workers' turns never do a job twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from dbqueue import ConnectionLost, DatabaseBusy, DatabaseError, KeyTaken
from dbqueue.database.dialect import OwnSession, Session
from dbqueue.database.engine import Database
from dbqueue.database.tables import Changed, ClaimedRow, Fact, Held, Settlement, Turn
from dbqueue.ids import new_id, new_token
from dbqueue.states import Kind, State
from tests.factory import LEASE, claim_turn, make, new_job, rows, run_together
from tests.servers import Server
from tests.waiting import wait_for

TOO_LATE = 2**63 - 1
"""A delay that no instant can be added to."""


@pytest.mark.databases("postgres", "postgres15")
@pytest.mark.req("D11", "D13")
def test_one_bad_statement_undoes_the_whole_turn(db: Database, session: OwnSession) -> None:
    good, bad, held, ready = make(db, State.RUNNING), make(db, State.RUNNING), make(db, State.RUNNING), make(db)
    before = rows(db)
    turn = replace(
        claim_turn(2),
        settlements=[good.settlement(State.ACKED), bad.settlement(State.PENDING, Kind.FAILED, delay=TOO_LATE)],
        renewals=[held.held],
    )
    with pytest.raises(DatabaseError) as caught, db.errors():
        db.dialect.turn(session, turn)
    assert not isinstance(caught.value, (ConnectionLost, DatabaseBusy, KeyTaken))
    assert rows(db) == before
    result = db.dialect.turn(session, replace(turn, settlements=turn.settlements[:1]))
    assert (result.settled, result.renewed) == ([Fact.DONE], [Fact.RENEWED])
    assert [row.id for row in result.claimed] == [ready.id]


@pytest.mark.req("D13")
def test_an_empty_turn(db: Database, session: OwnSession) -> None:
    result = db.dialect.turn(session, Turn())
    assert (result.settled, result.renewed, result.claimed) == ([], [], [])
    assert db.run(lambda s: db.dialect.settle(s, [])) == []
    assert db.run(lambda s: db.dialect.renew(s, [], LEASE)) == []


@pytest.mark.databases("postgres")
@pytest.mark.req("D11")
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_isolation", "repeatable read"),
        ("search_path", "nowhere"),
        ("timezone", "Asia/Tokyo"),
        ("extra_float_digits", "0"),
        ("bytea_output", "escape"),
    ],
)
def test_what_a_role_or_a_database_defaults_to_does_not_matter(
    postgres: Server, fresh_db: Database, setting: str, value: str
) -> None:
    name = str(fresh_db.url.database)
    postgres.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'")
    with closing(Database(fresh_db.url.render_as_string(hide_password=False))) as database:
        database.ready()
        payload = bytes(range(256))
        database.run(
            lambda s: database.dialect.enqueue_many(s, [new_job(payload=payload, key="'\\k") for _ in range(2)])
        )
        with closing(database.open_session()) as session:
            claimed = database.dialect.turn(session, claim_turn(2)).claimed
            assert [(row.payload, row.key) for row in claimed] == [(payload, "'\\k")]
            settlement = Settlement(claimed[0].id, claimed[0].token, State.SUCCEEDED, "default")
            assert database.dialect.turn(session, Turn([settlement])).settled == [Fact.DONE]


class Storm:
    """Jobs, workers who claim, renew, settle, stall past their leases, crash and hand back, and an operator."""

    LEASE = 150_000

    def __init__(self, db: Database, total: int) -> None:
        self.db, self.until = db, time.monotonic() + 30
        jobs = [new_job(max_attempts=1_000) for _ in range(total)]
        self.ids = [answer.id for answer in db.run(lambda s: db.dialect.enqueue_many(s, jobs))]
        self.done: Counter[bytes] = Counter()
        self.cancelled: set[bytes] = set()
        self._lock = threading.Lock()

    def goes_on(self) -> bool:
        with self._lock:
            return len(self.done) + len(self.cancelled) < len(self.ids) and time.monotonic() < self.until

    def work(self, number: int) -> None:
        chance, batch = random.Random(number), list[Settlement]()
        with closing(self.db.open_session()) as session:
            while self.goes_on():
                claim = claim_turn(4, lease=self.LEASE, worker=f"w{number}")
                try:
                    with self.db.errors():
                        result = self.db.dialect.turn(session, replace(claim, settlements=batch))
                except DatabaseBusy:  # SQLite, for a moment
                    continue
                facts = list(zip(batch, result.settled, strict=True))
                with self._lock:
                    self.done.update(s.id for s, fact in facts if fact in (Fact.DONE, Fact.ALREADY))
                batch = [s for s, fact in facts if fact is Fact.BUSY]
                batch += [self._outcome(row, chance.random()) for row in result.claimed if chance.random() < 0.9]
                if batch and chance.random() < 0.2:
                    self._renew(batch)
                if chance.random() < 0.05:
                    time.sleep(self.LEASE / 1e6)  # a stall, in which leases end
                self.db.dialect.upkeep(session, 50, ("default",))

    def _outcome(self, row: ClaimedRow, chance: float) -> Settlement:
        if chance < 0.7:
            return Settlement(row.id, row.token, State.SUCCEEDED, row.queue)
        return Settlement(row.id, row.token, State.PENDING, row.queue, Kind.RELEASED, refund=True)

    def _renew(self, batch: list[Settlement]) -> None:
        held = [Held(s.id, s.token) for s in batch]
        facts = self.db.run(lambda s: self.db.dialect.renew(s, held, self.LEASE))
        assert set(facts) <= {Fact.RENEWED, Fact.BUSY, Fact.LOST}

    def operate(self) -> None:
        chance = random.Random(7)
        while self.goes_on():
            job_id = chance.choice(self.ids)
            if self._by_hand(self.db.dialect.cancel, job_id):
                with self._lock:
                    self.cancelled.add(job_id)
                if chance.random() < 0.8:
                    with self._lock:
                        self.cancelled.discard(job_id)
                    assert self._by_hand(self.db.dialect.retry, job_id)
            time.sleep(0.001)

    def _by_hand(self, verb: Callable[[Session, bytes], Changed], job_id: bytes) -> bool:
        return self.db.run(lambda session: verb(session, job_id)).moved


@pytest.mark.req("D11", "D12", "D13")
def test_workers_and_operators_together_do_every_job_once(db: Database) -> None:
    storm = Storm(db, 300)
    run_together([*(partial(storm.work, number) for number in range(6)), storm.operate])
    after = rows(db)
    assert not after.jobs
    states = Counter(State(row["state"]) for row in after.finished.values())
    succeeded = len(storm.ids) - len(storm.cancelled)
    assert states == Counter({State.SUCCEEDED: succeeded, State.CANCELLED: len(storm.cancelled)}) + Counter()
    assert sorted(id_ for id_, _ in after.finished) == sorted(storm.ids)
    assert set(storm.done.values()) == {1}
    assert not set(storm.done) & storm.cancelled


def test_an_unknown_id_is_lost(db: Database, session: OwnSession) -> None:
    assert db.dialect.turn(session, Turn([Settlement(new_id(), new_token(), State.SUCCEEDED, "q")])).settled == [
        Fact.LOST
    ]


@pytest.mark.databases("postgres")
def test_a_session_that_the_server_ended_is_not_used_again(postgres: Server, fresh_db: Database) -> None:
    """Terminated, and timed out inside a transaction: both are errors of the connection, and the pool lets go of it."""
    name = str(fresh_db.url.database)

    def terminated(session: OwnSession) -> None:
        postgres.terminate_connections(name)
        session.execute("SELECT 1")

    def idle(session: OwnSession) -> None:
        session.execute("SET idle_in_transaction_session_timeout = 1")
        session.begin()
        wait_for(lambda: not postgres.execute("SELECT 1 FROM pg_stat_activity WHERE datname = %s", (name,)))
        session.execute("SELECT 1")

    for verb in (terminated, idle):
        with pytest.raises(ConnectionLost):
            fresh_db.single(verb)
        assert fresh_db.single(lambda session: session.execute("SELECT 1")) == [(1,)]


# -- the connection of a turn -------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
@pytest.mark.req("D11")
def test_a_rollback_between_two_turns_does_not_spoil_the_next(db: Database, session: OwnSession) -> None:
    """psycopg deallocates every prepared statement of its connection then, once it has prepared one of its own."""
    db.dialect.turn(session, claim_turn())
    for _ in range(8):
        session.execute("SELECT %(n)s::int", {"n": 1})
    session.begin()
    session.rollback()
    job = make(db)
    assert [row.id for row in db.dialect.turn(session, claim_turn()).claimed] == [job.id]


@pytest.mark.databases("postgres")
@pytest.mark.req("D3")
def test_a_rollback_between_two_jobs_does_not_spoil_the_second(db: Database, session: OwnSession) -> None:
    db.dialect.enqueue(session, new_job())
    for _ in range(8):
        session.execute("SELECT %(n)s::int", {"n": 1})
    with session.connection.transaction(force_rollback=True):
        session.execute("SELECT %(n)s::int", {"n": 1})
    for _ in range(2):
        assert not db.dialect.enqueue(session, new_job()).duplicate
    assert len(rows(db).jobs) == 3


@pytest.mark.databases("postgres")
@pytest.mark.req("D11")
def test_behind_a_transaction_pooler_nothing_is_prepared(db: Database) -> None:
    url = db.url.update_query_dict({"pgbouncer": "true"}).render_as_string(hide_password=False)
    with closing(Database(url)) as behind, closing(behind.open_session()) as session:
        for _ in range(8):
            job = make(db)
            claimed = behind.dialect.turn(session, claim_turn()).claimed
            assert [row.id for row in claimed] == [job.id]
            ended = Settlement(claimed[0].id, claimed[0].token, State.ACKED, "default")
            assert behind.dialect.turn(session, Turn([ended])).settled == [Fact.DONE]
            behind.dialect.upkeep(session, 10, ("default",))
            behind.dialect.enqueue(session, new_job(queue="other"))
        assert session.execute("SELECT count(*) FROM pg_prepared_statements") == [(0,)]


@pytest.mark.databases("postgres")
@pytest.mark.req("D11")
@pytest.mark.parametrize(
    ("how", "error"), [("pg_terminate_backend", ConnectionLost), ("pg_cancel_backend", DatabaseBusy)]
)
def test_a_turn_that_is_ended_under_way_raises_and_changes_nothing(
    db: Database, session: OwnSession, how: str, error: type[Exception]
) -> None:
    job, ready = make(db, State.RUNNING), make(db)
    before, pid = rows(db), session.execute("SELECT pg_backend_pid()")[0][0]
    turn = replace(claim_turn(), settlements=[job.settlement(State.ACKED)], renewals=[job.held])
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with db.errors():
                db.dialect.turn(session, turn)
        except Exception as caught:
            raised.append(caught)

    with db.transaction() as other:
        other.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=run)
        thread.start()
        waits = f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
        wait_for(lambda: other.execute(waits))
        other.execute(f"SELECT {how}({pid})")
        thread.join(10)
        assert not thread.is_alive()
    assert type(raised[0]) is error
    assert rows(db) == before
    if error is DatabaseError:
        result = db.dialect.turn(session, turn)
        assert (result.settled, [row.id for row in result.claimed]) == ([Fact.DONE], [ready.id])
