"""What each verb writes, column by column: attempts, lapses, instants, keys, errors. A column that is not named here keeps its value."""

from __future__ import annotations

from typing import Any

import pytest

from dbqueue import jobs
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import FINISHED_COLUMNS, JOB_COLUMNS, ClaimedRow, Fact, Held, Settlement, Turn
from dbqueue.ids import ZERO, new_id, new_token
from dbqueue.states import Kind, OnCrash, State
from tests.factory import LEASE, Job, Row, claim_turn, make, new_job, now, rows, set_columns

pytestmark = pytest.mark.databases("sqlite", "postgres", "postgres15")

FULL: dict[str, Any] = {
    "task_id": "celery-1", "fingerprint": b"\x00\xff", "payload": b'{"a": 1}', "key": "k", "queue": "q", "priority": 4,
    "max_attempts": 7, "timeout_ms": 1500, "source": "schedule:s", "sequence": 12, "error_kind": "failed",
    "error_summary": "ValueError", "lapses": 2,
}  # fmt: skip
"""Every column that a verb has to carry along, with a value of its own."""

MINUTE = 60_000_000


class Between:
    """An instant that the database read between two of ours."""

    def __init__(self, db: Database) -> None:
        self._db, self._first = db, now(db)

    def __call__(self, instant: int) -> int:
        assert self._first <= instant <= now(self._db)
        return instant


def changed(before: Row, after: Row | None) -> Row:
    assert after is not None
    return {name: value for name, value in after.items() if name in before and before[name] != value}


def moved_from(db: Database, job: Job) -> tuple[Row, Row]:
    """The ended job's row, and what in it differs from the job it was."""
    found = rows(db)
    assert job.id not in found.jobs
    row = found.of(job.id)
    assert row is not None
    assert set(row) == set(FINISHED_COLUMNS)
    return row, changed(job.row, row)


def moved_back(db: Database, job: Job) -> tuple[Row, Row]:
    found = rows(db)
    assert not found.finished
    row = found.jobs[job.id]
    assert set(row) == set(JOB_COLUMNS)
    return row, changed(job.row, row)


def settle(db: Database, settlement: Settlement) -> Fact:
    return db.run(lambda session: db.dialect.settle(session, [settlement])[0])


# -- producers ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("D7")
@pytest.mark.parametrize("many", [False, True])
def test_enqueue_writes_what_it_was_given(db: Database, many: bool) -> None:
    at = Between(db)
    given = {
        "fingerprint": b"\x01" * 32, "payload": b'"\\u0000 and bytes"', "key": "k'\"%s:x", "queue": "q", "priority": 2, "max_attempts": 5,
        "timeout_ms": 2500, "on_crash": OnCrash.UNKNOWN, "source": "s", "sequence": 2**40,
    }  # fmt: skip
    if not many:
        given["task_id"] = "t"
    job = new_job(**given)
    written = db.run(lambda s: db.dialect.enqueue_many(s, [job]) if many else [db.dialect.enqueue(s, job)])
    assert [(e.id, e.duplicate) for e in written] == [(job.id, False)]
    row = rows(db).jobs[job.id]
    instant = at(row["created_at"])
    expected = dict.fromkeys(JOB_COLUMNS) | given | {
        "id": job.id, "target": job.target, "state": 0, "on_crash": 1, "attempt": 0, "lapses": 0, "created_at": instant,
        "updated_at": instant, "run_at": instant, "ready_at": instant,
    }  # fmt: skip
    assert row == expected


@pytest.mark.req("D7", "H14")
@pytest.mark.parametrize("many", [False, True])
def test_when_a_job_is_due(db: Database, many: bool) -> None:
    here = now(db)
    cases = [
        ({"delay": MINUTE}, MINUTE, False),
        ({"run_at": here + MINUTE}, None, False),
        ({"run_at": here - MINUTE}, None, True),
    ]
    for when, delay, ready in cases:
        job = new_job(**when)
        db.run(lambda s, job=job: db.dialect.enqueue_many(s, [job]) if many else db.dialect.enqueue(s, job))  # type: ignore[misc]
        row = rows(db).jobs[job.id]
        assert row["run_at"] == (when["run_at"] if delay is None else row["created_at"] + delay)
        assert row["ready_at"] == (row["created_at"] if ready else None)


@pytest.mark.req("D8")
@pytest.mark.parametrize("many", [False, True])
def test_the_same_id_again_is_the_same_job(db: Database, many: bool) -> None:
    """An insert whose answer was lost may commit while it is sent once more."""
    for key in (None, "k"):
        job = new_job(key=key)
        for _ in range(2):
            written = db.run(
                lambda s, job=job: db.dialect.enqueue_many(s, [job]) if many else [db.dialect.enqueue(s, job)]  # type: ignore[misc]
            )
            assert [(e.id, e.duplicate) for e in written] == [(job.id, False)]
    assert len(rows(db).jobs) == 2


@pytest.mark.req("D8")
def test_a_batch_answers_in_order_and_its_own_duplicates_too(db: Database) -> None:
    holder = make(db, State.RUNNING, key="held")
    keys = ["b", None, "a", "b", "held", None, "a"]
    batch = [new_job(key=key) for key in keys]
    answers = db.run(lambda s: db.dialect.enqueue_many(s, batch))
    ids = [job.id for job in batch]
    assert [(e.id, e.duplicate) for e in answers] == [
        (ids[0], False), (ids[1], False), (ids[2], False), (ids[0], True), (holder.id, True), (ids[5], False), (ids[2], True),
    ]  # fmt: skip
    assert len(rows(db).jobs) == 5
    assert db.run(lambda s: db.dialect.enqueue_many(s, [])) == []


def test_exists_sees_jobs_and_history(db: Database) -> None:
    present = [make(db), make(db, State.DEAD)]
    for job_id, found in [(present[0].id, True), (present[1].id, True), (new_id(), False)]:
        assert db.read(lambda s, job_id=job_id: db.dialect.exists(s, job_id)) is found  # type: ignore[misc]


# -- executors ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("D7", "D12")
def test_claim(db: Database, session: OwnSession) -> None:
    job = make(db, **FULL)
    at, token = Between(db), new_token()
    result = db.dialect.turn(session, claim_turn(queues=("q",), lease=7 * MINUTE, worker="me", token=token))
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    assert difference == {
        "state": 1, "attempt": 1, "token": token, "worker": "me", "lease_until": instant + 7 * MINUTE, "ready_at": None,
        "queued_at": job.row["ready_at"],
        "started_at": instant, "updated_at": instant,
    }  # fmt: skip
    shown = {name: row[name] for name in ClaimedRow.__struct_fields__ if name != "ready_at"}
    assert result.claimed == [ClaimedRow(ready_at=job.row["ready_at"], **shown)]
    assert isinstance(result.claimed[0].payload, bytes)
    assert result.now is not None
    at(result.now)


@pytest.mark.req("D12")
def test_claim_takes_the_best_first_and_no_more_than_asked(db: Database, session: OwnSession) -> None:
    at = now(db) - MINUTE
    ids = [bytes([n]) + ZERO[1:] for n in range(6)]
    make(db, id=ids[0], priority=9, ready_at=at)
    make(db, id=ids[1], priority=0, ready_at=at + 2)
    make(db, id=ids[2], priority=0, ready_at=at + 1)
    make(db, id=ids[4], priority=5, ready_at=at + 1)
    make(db, id=ids[3], priority=5, ready_at=at + 1)
    make(db, id=ids[5], priority=0, ready_at=at, queue="other")
    claimed = [db.dialect.turn(session, claim_turn(limit)).claimed for limit in (2, 2, 1, 4)]
    assert [[row.id for row in rows_] for rows_ in claimed] == [[ids[2], ids[1]], [ids[3], ids[4]], [ids[0]], []]


@pytest.mark.req("D14")
@pytest.mark.parametrize("in_turn", [False, True])
def test_renew(db: Database, session: OwnSession, in_turn: bool) -> None:
    job = make(db, State.RUNNING, **FULL)
    db.clock.advance(30)
    at = Between(db)
    if in_turn:
        facts = db.dialect.turn(session, Turn(renewals=[job.held], lease=LEASE)).renewed
    else:
        facts = db.run(lambda s: db.dialect.renew(s, [job.held], LEASE))
    assert facts == [Fact.RENEWED]
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    assert difference == {"lease_until": instant + LEASE, "updated_at": instant}


ERROR = {"error_kind": "timeout", "error_summary": "Late"}


@pytest.mark.req("D7", "D14")
@pytest.mark.parametrize("delay", [0, 5 * MINUTE])
def test_retry_later_sets_run_at_and_keeps_the_attempt(db: Database, delay: int) -> None:
    job = make(db, State.RUNNING, **FULL)
    at = Between(db)
    assert settle(db, job.settlement(State.PENDING, Kind.TIMEOUT, summary="Late", delay=delay)) is Fact.AGAIN
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    expected = {"state": 0, "lease_until": None, "run_at": instant + delay, "updated_at": instant, **ERROR}
    assert difference == (expected if delay else expected | {"ready_at": instant})


@pytest.mark.req("D7", "D12")
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("state", [State.PENDING, State.UNKNOWN])
def test_a_crash_is_counted_apart_as_a_lost_lease_is(
    db: Database, session: OwnSession, state: State, in_turn: bool
) -> None:
    job, other = make(db, State.RUNNING, **FULL), make(db, State.RUNNING)
    asked = [job.settlement(state, Kind.CRASHED, summary="Late"), other.settlement(State.PENDING, Kind.FAILED)]
    if in_turn:
        db.dialect.turn(session, Turn(asked))
    else:
        db.run(lambda s: db.dialect.settle(s, asked))
    assert moved_back(db, job)[1]["lapses"] == job.row["lapses"] + 1
    assert moved_back(db, other)[0]["lapses"] == 0, "its neighbour failed"


@pytest.mark.req("D7", "D12")
def test_release_gives_the_attempt_back_and_keeps_run_at(db: Database) -> None:
    job = make(db, State.RUNNING, **FULL)
    at = Between(db)
    assert settle(db, job.settlement(State.PENDING, Kind.RELEASED, refund=True)) is Fact.AGAIN
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    assert difference == {
        "state": 0, "lease_until": None, "attempt": 0, "ready_at": instant, "updated_at": instant, "error_kind": "released",
        "error_summary": None,
    }  # fmt: skip


def test_release_for_later_waits(db: Database, session: OwnSession) -> None:
    job = make(db, State.RUNNING)
    assert settle(db, job.settlement(State.PENDING, refund=True, delay=MINUTE)) is Fact.AGAIN
    row, difference = moved_back(db, job)
    assert difference == {
        "state": 0, "lease_until": None, "attempt": 0, "run_at": row["updated_at"] + MINUTE, "updated_at": row["updated_at"],
    }  # fmt: skip
    assert db.dialect.upkeep(session, 10, ("default",)).promoted == 0
    db.clock.advance(61)
    assert db.dialect.upkeep(session, 10, ("default",)).promoted == 1


def test_a_settlement_without_an_error_leaves_the_last_one_of_a_job_that_goes_on(db: Database) -> None:
    job = make(db, State.RUNNING, **FULL)
    settle(db, job.settlement(State.PENDING, refund=True))
    row, _ = moved_back(db, job)
    assert (row["error_kind"], row["error_summary"]) == ("failed", "ValueError")


@pytest.mark.req("C8", "D7")
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("delay", [0, MINUTE])
def test_a_job_that_goes_on_with_another_payload_loses_no_attempt(
    db: Database, session: OwnSession, delay: int, in_turn: bool
) -> None:
    job, other = make(db, State.RUNNING, **FULL), make(db, State.RUNNING)
    at = Between(db)
    asked = [
        job.settlement(State.PENDING, Kind.FAILED, summary="Retry: 1", delay=delay, payload=b'{"a": 2}\x00'),
        other.settlement(State.PENDING, Kind.FAILED, delay=delay),
    ]
    facts = (
        db.dialect.turn(session, Turn(asked)).settled if in_turn else [settle(db, settlement) for settlement in asked]
    )
    assert facts == [Fact.AGAIN, Fact.AGAIN]
    row, difference = moved_back(db, job)
    instant = row["updated_at"] if in_turn else at(row["updated_at"])
    expected = {
        "state": 0, "lease_until": None, "run_at": instant + delay, "updated_at": instant, "error_summary": "Retry: 1",
        "payload": b'{"a": 2}\x00', "max_attempts": 8,
    }  # fmt: skip
    assert difference == (expected if delay else expected | {"ready_at": instant})
    row, difference = moved_back(db, other)
    assert (row["payload"], row["max_attempts"]) == (b"{}", 3), "its neighbour keeps what it has"
    assert settle(db, asked[0]) is Fact.ALREADY, "and the same again changes nothing"
    assert moved_back(db, job)[0]["max_attempts"] == 8


@pytest.mark.req("D9")
@pytest.mark.parametrize("refund", [False, True])
def test_block(db: Database, refund: bool) -> None:
    job = make(db, State.RUNNING, **FULL)
    at = Between(db)
    assert settle(db, job.settlement(State.BLOCKED, Kind.SCHEMA_MISMATCH, refund=refund)) is Fact.DONE
    row, difference = moved_back(db, job)
    expected = {
        "state": 2, "lease_until": None, "updated_at": at(row["updated_at"]), "error_kind": "schema_mismatch",
        "error_summary": None,
    }  # fmt: skip
    assert difference == (expected | {"attempt": 0} if refund else expected)


@pytest.mark.req("D7", "D10")
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("state", [State.SUCCEEDED, State.ACKED])
def test_an_end_without_error(db: Database, session: OwnSession, state: State, keep: bool, in_turn: bool) -> None:
    """The same row whether the fast path wrote it or the full one: the errors of earlier attempts are gone."""
    job = make(db, State.RUNNING, **FULL)
    at = Between(db)
    db.dialect.keep = keep  # type: ignore[attr-defined]
    try:
        settlement = job.settlement(state)
        fact = db.dialect.turn(session, Turn([settlement])).settled[0] if in_turn else settle(db, settlement)
    finally:
        db.dialect.keep = False  # type: ignore[attr-defined]
    assert fact is Fact.DONE
    row, difference = moved_from(db, job)
    expected = {"state": int(state), "error_kind": None, "error_summary": None}
    assert difference == (expected if keep else expected | {"payload": None})
    at(row["finished_at"])


@pytest.mark.req("D9")
def test_bury_keeps_the_payload(db: Database) -> None:
    job = make(db, State.RUNNING, **FULL)
    assert settle(db, job.settlement(State.DEAD, Kind.TIMEOUT, summary="Late")) is Fact.DONE
    assert moved_from(db, job)[1] == {"state": 6, **ERROR}


@pytest.mark.req("D11")
def test_release_unknown_hands_back_only_what_the_worker_does_not_know(db: Database, session: OwnSession) -> None:
    known = make(db, State.RUNNING, worker="me")
    lost = [make(db, State.RUNNING, worker="me", **FULL | {"key": None}), make(db, State.RUNNING, worker="me")]
    earlier = Held(lost[1].id, new_token())
    """A claim of the same job that it had before: it does not know the present one."""
    others = make(db, State.RUNNING, worker="you")
    before, at = rows(db), Between(db)
    assert db.dialect.release_unknown(session, "me", [known.held, earlier]) == 2
    after = rows(db)
    for job in lost:
        row = after.jobs[job.id]
        instant = at(row["updated_at"])
        assert changed(before.jobs[job.id], row) == {
            "state": 0, "token": None, "lease_until": None, "attempt": 0, "ready_at": instant, "updated_at": instant,
        }  # fmt: skip
    for job in (known, others):
        assert after.jobs[job.id] == before.jobs[job.id]
    assert db.dialect.release_unknown(session, "me", [known.held]) == 0
    assert settle(db, lost[0].settlement(State.SUCCEEDED)) is Fact.LOST


# -- upkeep ------------------------------------------------------------------------------------------------------------


@pytest.mark.req("D12", "H14")
def test_promote(db: Database, session: OwnSession) -> None:
    job = make(db, run_at=now(db) + MINUTE, **FULL)
    later = make(db, run_at=now(db) + 10 * MINUTE)
    db.clock.advance(61)
    at = Between(db)
    due = db.dialect.upkeep(session, 10, ("q",))
    assert (due.promoted, due.again, due.dead, due.unknown) == (1, 0, 0, 0)
    assert due.next_run == later.row["run_at"]
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    assert difference == {"ready_at": instant, "updated_at": instant}


CRASHED = {"error_kind": "crashed", "error_summary": None, "lapses": 3, "token": None}


@pytest.mark.req("D7", "D12")
@pytest.mark.parametrize(("on_crash", "attempt", "state"), [(0, 6, 0), (1, 1, 3), (1, 7, 3)])
def test_expire_of_a_job_that_goes_on(
    db: Database, session: OwnSession, on_crash: int, attempt: int, state: int
) -> None:
    job = make(db, State.RUNNING, **FULL, on_crash=on_crash, attempt=attempt)
    db.clock.advance(61)
    at = Between(db)
    db.dialect.upkeep(session, 10, ("q",))
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    expected = CRASHED | {"lease_until": None, "updated_at": instant}
    if state:
        expected["state"] = state
    assert difference == (expected if state else expected | {"state": 0, "ready_at": instant})


@pytest.mark.req("D9", "D12")
@pytest.mark.parametrize(("on_crash", "attempt"), [(0, 7), (2, 1)])
def test_expire_of_the_last_attempt(db: Database, session: OwnSession, on_crash: int, attempt: int) -> None:
    job = make(db, State.RUNNING, **FULL, on_crash=on_crash, attempt=attempt)
    db.clock.advance(61)
    db.dialect.upkeep(session, 10, ("q",))
    assert moved_from(db, job)[1] == CRASHED | {"state": 6}


@pytest.mark.req("D9", "D11")
def test_upkeep_is_bounded_and_says_that_more_is_due(db: Database, session: OwnSession) -> None:
    waiting = [make(db, run_at=now(db) + MINUTE + n) for n in range(5)]
    running = [make(db, State.RUNNING, lease_until=now(db) + MINUTE + n, attempt=n) for n in range(5)]
    db.clock.advance(120)
    promoted = swept = 0
    for _ in range(3):
        due = db.dialect.upkeep(session, 2, ("default",))
        assert due.promoted <= 2
        assert due.again + due.dead <= 2
        promoted, swept = promoted + due.promoted, swept + due.again + due.dead
        more = promoted < 5 or swept < 5
        soonest = [t for t in (due.next_run, due.next_lease) if t is not None]
        assert not more or min(soonest) <= due.now
    assert (promoted, swept) == (len(waiting), len(running))


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, State.BLOCKED])
def test_cancel_keeps_everything_but_the_token(db: Database, state: State) -> None:
    job = make(db, state, **FULL)
    db.run(lambda session: jobs.cancel(db.dialect, session, job.id))
    row, difference = moved_from(db, job)
    assert row["token"] is None
    assert difference == {"state": 7} | ({"token": None} if job.row["token"] else {})


@pytest.mark.req("D8")
@pytest.mark.parametrize("state", [State.DEAD, State.CANCELLED, State.SUCCEEDED, State.ACKED])
def test_retry_of_an_ended_job_starts_afresh(db: Database, state: State) -> None:
    job = make(db, state, **FULL, attempt=7)
    at = Between(db)
    db.run(lambda session: jobs.retry(db.dialect, session, job.id))
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    assert difference == {
        "state": 0, "attempt": 0, "lapses": 0, "run_at": instant, "token": None, "worker": None, "started_at": None,
    }  # fmt: skip
    assert row["ready_at"] == instant


@pytest.mark.req("D8")
@pytest.mark.parametrize(("attempt", "then"), [(3, 3), (7, 0)])
def test_retry_of_a_blocked_job_goes_on_where_it_was(db: Database, attempt: int, then: int) -> None:
    job = make(db, State.BLOCKED, **FULL, attempt=attempt)
    at = Between(db)
    db.run(lambda session: jobs.retry(db.dialect, session, job.id))
    row, difference = moved_back(db, job)
    instant = at(row["updated_at"])
    expected = {"state": 0, "run_at": instant, "ready_at": instant, "updated_at": instant}
    assert difference == (expected if then else expected | {"attempt": 0})


@pytest.mark.req("D8", "H7")
@pytest.mark.parametrize("state", [State.SUCCEEDED, State.DISCARDED])
def test_resolve(db: Database, state: State) -> None:
    job = make(db, State.UNKNOWN, **FULL)
    db.run(lambda session: jobs.resolve(db.dialect, session, job.id, state, job.row["updated_at"]))
    assert moved_from(db, job)[1] == {"state": int(state)}


def test_a_job_that_ended_twice_is_retried_from_its_last_end(db: Database) -> None:
    """Its id came again after it had ended, as a slot's or a redelivered message's may."""
    job = make(db, State.DEAD, payload=b"1")
    make(db, State.CANCELLED, id=job.id, payload=b"2", finished_at=job.row["finished_at"] + 1)
    db.run(lambda session: jobs.retry(db.dialect, session, job.id))
    after = rows(db)
    assert after.jobs[job.id]["payload"] == b"2"
    assert [row["payload"] for row in after.finished.values()] == [b"1"]


# -- history -----------------------------------------------------------------------------------------------------------


def test_prune_deletes_the_oldest_of_the_states_up_to_the_limit(db: Database) -> None:
    here = now(db)
    old = [make(db, State.SUCCEEDED, finished_at=here - MINUTE - n) for n in range(3)]
    dead = [make(db, State.DEAD, finished_at=here - MINUTE - n) for n in range(3)]
    kept = [make(db, State.CANCELLED, finished_at=here - MINUTE), make(db, State.SUCCEEDED, finished_at=here), make(db)]

    def prune(limit: int) -> int:
        return db.run(lambda s: db.dialect.prune(s, [State.SUCCEEDED, State.DEAD], here - MINUTE + 1, limit))

    assert prune(2) == 2
    assert {id_ for id_, _ in rows(db).finished} == {old[0].id, *(j.id for j in dead), *(j.id for j in kept[:2])}
    assert prune(2) == 2
    assert prune(10) == 2
    assert prune(10) == 0
    after = rows(db)
    assert {id_ for id_, _ in after.finished} == {job.id for job in kept[:2]}
    assert set(after.jobs) == {kept[2].id}


def test_prune_of_a_job_that_ended_twice_leaves_its_later_end(db: Database) -> None:
    job = make(db, State.DEAD)
    make(db, State.DEAD, id=job.id, finished_at=job.row["finished_at"] + MINUTE)
    before = job.row["finished_at"] + 1
    assert db.run(lambda s: db.dialect.prune(s, [State.DEAD], before, 10)) == 1
    assert list(rows(db).finished) == [(job.id, job.row["finished_at"] + MINUTE)]


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.req("D8")
@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("many", [False, True])
def test_who_holds_a_key(db: Database, state: State, many: bool) -> None:
    holder = make(db, state, key="k")
    job, other_target = new_job(key="k"), new_job(key="k", target="tests.other")
    holds = state in (State.PENDING, State.RUNNING, State.UNKNOWN)
    for new, found, duplicate in [(job, holder.id if holds else job.id, holds), (other_target, other_target.id, False)]:
        written = db.run(lambda s, new=new: db.dialect.enqueue_many(s, [new]) if many else [db.dialect.enqueue(s, new)])  # type: ignore[misc]
        assert [(e.id, e.duplicate) for e in written] == [(found, duplicate)]


@pytest.mark.req("D8")
@pytest.mark.parametrize("state", [State.BLOCKED, State.DEAD, State.CANCELLED, State.SUCCEEDED, State.ACKED])
@pytest.mark.parametrize("holder", [State.PENDING, State.RUNNING, State.UNKNOWN])
def test_retry_into_a_taken_key_changes_nothing(db: Database, state: State, holder: State) -> None:
    job = make(db, state, key="k")
    taker = make(db, holder, key="k")
    before = rows(db)
    answer = db.run(lambda session: db.dialect.retry(session, job.id))
    assert (answer.found, answer.moved, answer.reason) == (state, False, "key")
    assert rows(db) == before
    set_columns(db, taker.id, key="free")
    assert db.run(lambda session: db.dialect.retry(session, job.id)).moved
