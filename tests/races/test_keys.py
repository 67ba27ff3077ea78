"""Dedupe keys under contention: one unfinished job per target and key, whoever calls, and nobody waits for ever (D8)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from dbqueue import DBQueue, IllegalMove, JobRef, KeyTaken, Target
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import Fact, Turn
from dbqueue.ids import as_uuid
from dbqueue.states import KEY_HOLDERS, State
from tests.factory import Job, claim_turn, joined_to, make, new_job, rows, run_together
from tests.waiting import wait_for

CALLERS = 50


@pytest.fixture
def queue(database_url: str) -> Iterator[DBQueue]:
    queue = DBQueue(database_url, workers=7)
    yield queue
    queue.close()


def declared(queue: DBQueue) -> Target[None]:
    @queue.job(max_attempts=3, timeout=30, name="tests.keyed")
    def keyed() -> None: ...

    return keyed


def unfinished(db: Database, key: str) -> list[bytes]:
    return [row["id"] for row in rows(db).jobs.values() if row["key"] == key and row["state"] in KEY_HOLDERS]


@pytest.mark.req("D8")
def test_fifty_callers_of_one_key_get_one_job(queue: DBQueue) -> None:
    target, answers = declared(queue), list[JobRef]()
    run_together([lambda: answers.append(target.enqueue(key="k"))] * CALLERS)
    assert len({ref.id for ref in answers}) == 1
    assert sorted(bool(ref.duplicate) for ref in answers) == [False] + [True] * (CALLERS - 1)
    assert unfinished(queue.database, "k") == [answers[0].id.bytes]


@pytest.mark.req("D8")
def test_callers_and_a_worker_that_frees_the_key_again_and_again(queue: DBQueue) -> None:
    """Whenever an answer says "not a duplicate" there was room for it: as many fresh jobs as ends, and never two at once."""
    target, answers, ended, seen = declared(queue), list[JobRef](), list[bytes](), list[int]()
    database, producing = queue.database, threading.Event()
    database.ready()

    def produce() -> None:
        for _ in range(60):
            answers.append(target.enqueue(key="k"))

    def work() -> None:
        with database.session() as session:
            while not producing.is_set():
                for row in database.dialect.turn(session, claim_turn(1)).claimed:
                    ended.append(row.id)
                    settled = Turn([Job(row.id, row.token, {"queue": row.queue}).settlement(State.SUCCEEDED)])
                    assert database.dialect.turn(session, settled).settled == [Fact.DONE]

    def watch() -> None:
        while not producing.is_set():
            seen.append(len(unfinished(database, "k")))

    def produce_all() -> None:
        try:
            run_together([produce] * 6)
        finally:
            producing.set()

    run_together([produce_all, work, watch])
    fresh = [ref.id.bytes for ref in answers if not ref.duplicate]
    left = unfinished(database, "k")
    assert sorted(fresh) == sorted(ended + left)
    assert {ref.id.bytes for ref in answers} == set(fresh)
    assert max(seen) == 1


ENDS = [
    (State.SUCCEEDED, State.SUCCEEDED),
    (State.ACKED, State.ACKED),
    (State.DEAD, State.DEAD),
    (State.BLOCKED, State.BLOCKED),
    (State.CANCELLED, State.CANCELLED),
    (State.UNKNOWN, State.DISCARDED),
    (State.UNKNOWN, State.SUCCEEDED),
]


@pytest.mark.req("D8", "H7")
@pytest.mark.parametrize(("first", "then"), ENDS)
def test_a_key_is_free_after_each_kind_of_end(db: Database, session: OwnSession, first: State, then: State) -> None:
    made = db.run(lambda s: db.dialect.enqueue(s, new_job(key="k", on_crash=1 if first is State.UNKNOWN else 0)))
    row = db.dialect.turn(session, claim_turn()).claimed[0]
    job = Job(row.id, row.token, {"queue": row.queue})
    if first is State.CANCELLED:
        db.run(lambda s: db.dialect.cancel(s, job.id))
    elif first is State.UNKNOWN:
        db.clock.advance(61)
        assert db.dialect.upkeep(session, 10, ("default",)).unknown == 1
        assert db.run(lambda s: db.dialect.enqueue(s, new_job(key="k"))).duplicate
        seen = rows(db).jobs[job.id]["updated_at"]
        assert db.run(lambda s: db.dialect.resolve(s, job.id, then, seen)).moved
    else:
        assert db.dialect.turn(session, Turn([job.settlement(first)])).settled == [Fact.DONE]
    assert rows(db).state(made.id) is then
    again = [db.run(lambda s: db.dialect.enqueue(s, new_job(key="k"))) for _ in range(2)]
    assert [e.duplicate for e in again] == [False, True]
    assert again[0].id == again[1].id != made.id


@pytest.mark.req("D8")
def test_bulks_with_keys_in_opposite_orders_do_not_deadlock(db: Database) -> None:
    keys = [f"k{n:03}" for n in range(200)]
    answers: list[dict[str, bytes]] = []

    def enqueue(order: list[str]) -> None:
        batch = [new_job(key=key) for key in order]
        with db.transaction() as session:  # unlike `run`, it does not begin again after a deadlock
            written = db.dialect.enqueue_many(session, batch)
        answers.append({key: e.id for key, e in zip(order, written, strict=True)})

    run_together([lambda order=order: enqueue(order) for order in (keys, keys[::-1]) * 3])  # type: ignore[misc]
    assert len(answers) == 6
    assert all(answer == answers[0] for answer in answers)
    assert {row["key"]: id_ for id_, row in rows(db).jobs.items()} == answers[0]


@pytest.mark.req("D8")
@pytest.mark.databases("postgres", "postgres15")
def test_two_bulks_that_meet_half_way_do_not_deadlock(db: Database) -> None:
    """Both wait for the key in the middle at the same time: in the order in which they were given, each would now hold what the
    other one needs next."""

    def enqueue(order: str) -> None:
        with db.transaction() as session:
            db.dialect.enqueue_many(session, [new_job(key=key) for key in order])

    with psycopg.connect(db.url.render_as_string(hide_password=False)) as other:
        db.dialect.enqueue(joined_to(db, other), new_job(key="m"))
        bulks = threading.Thread(target=run_together, args=([lambda: enqueue("amz"), lambda: enqueue("zma")],))
        bulks.start()
        _wait_for_a_waiter(db, 2)
        other.rollback()
        bulks.join()
    assert sorted(row["key"] for row in rows(db).jobs.values()) == ["a", "m", "z"]


@pytest.mark.req("D8")
@pytest.mark.parametrize("state", ["dead", "blocked"])
def test_a_retry_into_a_taken_key_is_told_so(queue: DBQueue, state: str) -> None:
    database = queue.database
    database.ready()
    ended = make(database, State[state.upper()], target="tests.keyed", key="k")
    taker = declared(queue).enqueue(key="k")
    before = rows(database)
    with pytest.raises(KeyTaken) as caught:
        queue.retry(as_uuid(ended.id))
    assert isinstance(caught.value, IllegalMove)
    assert rows(database) == before
    queue.cancel(taker.id)
    assert queue.retry(as_uuid(ended.id)) == state
    assert rows(database).state(ended.id) is State.PENDING


@pytest.mark.req("D8")
@pytest.mark.databases("postgres", "postgres15")
@pytest.mark.parametrize("state", [State.DEAD, State.BLOCKED])
@pytest.mark.parametrize("commits", [True, False])
def test_a_retry_while_another_transaction_takes_the_key(db: Database, state: State, commits: bool) -> None:
    """It waits for the other transaction's end, and then says the truth."""
    ended, taker = make(db, state, key="k"), new_job(key="k")
    outcome: list[bool | None] = []

    def retry() -> None:
        try:
            outcome.append(db.run(lambda s: db.dialect.retry(s, ended.id)).moved)
        except KeyTaken:
            outcome.append(None)

    with psycopg.connect(db.url.render_as_string(hide_password=False)) as other:
        db.dialect.enqueue(joined_to(db, other), taker)
        thread = threading.Thread(target=retry)
        thread.start()
        _wait_for_a_waiter(db)
        other.commit() if commits else other.rollback()
        thread.join()
    after = rows(db)
    assert outcome[0] is True if not commits else not outcome[0]
    assert after.state(ended.id) is (state if commits else State.PENDING)
    assert (taker.id in after.jobs) is commits


@pytest.mark.req("D8")
@pytest.mark.databases("postgres")
def test_a_key_is_waited_for_while_its_holder_is_not_committed(db: Database) -> None:
    """An open transaction that enqueued a key blocks others with the same key; whoever waited gets the answer of its end."""
    for commits in (True, False):
        first, second = new_job(key=f"k{commits}"), new_job(key=f"k{commits}")
        answers: list[tuple[bytes, bool]] = []

        def enqueue(job: object = second, answers: list[tuple[bytes, bool]] = answers) -> None:
            with db.session() as session:
                answer = db.dialect.enqueue(session, job)  # type: ignore[arg-type]
            answers.append((answer.id, answer.duplicate))

        with psycopg.connect(db.url.render_as_string(hide_password=False)) as other:
            db.dialect.enqueue(joined_to(db, other), first)
            thread = threading.Thread(target=enqueue)
            thread.start()
            _wait_for_a_waiter(db)
            other.commit() if commits else other.rollback()
            thread.join()
        assert answers == [(first.id, True) if commits else (second.id, False)]


def _wait_for_a_waiter(db: Database, count: int = 1) -> None:
    question = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with db.session() as session:
        wait_for(lambda: session.execute(question)[0][0] >= count)
