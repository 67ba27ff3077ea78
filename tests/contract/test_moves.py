"""Every verb in every state: what the MOVES table allows leads to one of its states, and all else changes nothing.

The pairs are generated, so a state or a verb that is added to `states.py` is tried against all others at once. The verbs of an
executor are tried by each way into the database: the plain verb, and the worker's turn with its fast path for successes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dbqueue import jobs
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import Fact, Settlement, Turn
from dbqueue.errors import IllegalMove, JobNotFound, StaleUpdate
from dbqueue.ids import new_id, new_token
from dbqueue.states import MOVES, VERBS, Kind, OnCrash, State, sources
from tests.factory import LEASE, Job, claim_turn, clear, make, now, rows, set_columns

pytestmark = pytest.mark.databases("sqlite", "postgres", "postgres15")

REFUSED = "refused"
MOVED = "moved"


@dataclass(frozen=True)
class Lab:
    """One database and one worker's connection to it."""

    db: Database
    session: OwnSession

    def settle(self, settlement: Settlement) -> Fact:
        return self.db.run(lambda session: self.db.dialect.settle(session, [settlement])[0])

    def settle_in_turn(self, settlement: Settlement) -> Fact:
        return self.db.dialect.turn(self.session, Turn([settlement])).settled[0]

    def renew(self, job: Job) -> Fact:
        return self.db.run(lambda session: self.db.dialect.renew(session, [job.held], LEASE)[0])

    def renew_in_turn(self, job: Job) -> Fact:
        return self.db.dialect.turn(self.session, Turn(renewals=[job.held], lease=LEASE)).renewed[0]


@pytest.fixture
def lab(db: Database, session: OwnSession) -> Lab:
    return Lab(db, session)


# -- the verbs, as functions that say whether they moved the job ---------------------------------------------------------

Apply = Callable[[Lab, Job], str]


def _by_settling(state: State, kind: Kind | None = None, **more: Any) -> dict[str, Apply]:
    def with_(way: Callable[[Lab, Settlement], Fact]) -> Apply:
        def apply(lab: Lab, job: Job) -> str:
            fact = way(lab, job.settlement(state, kind, **more))
            assert fact in (Fact.DONE, Fact.AGAIN, Fact.LOST, Fact.ALREADY)
            assert fact is not Fact.AGAIN or state is State.PENDING
            return MOVED if fact in (Fact.DONE, Fact.AGAIN) else REFUSED

        return apply

    return {"verb": with_(Lab.settle), "turn": with_(Lab.settle_in_turn)}


def _claim(lab: Lab, job: Job) -> str:
    claimed = lab.db.dialect.turn(lab.session, claim_turn(8)).claimed
    assert {row.id for row in claimed} <= {job.id}
    return MOVED if claimed else REFUSED


def _by_renewing(way: Callable[[Lab, Job], Fact]) -> Apply:
    def apply(lab: Lab, job: Job) -> str:
        fact = way(lab, job)
        assert fact in (Fact.RENEWED, Fact.LOST)
        return MOVED if fact is Fact.RENEWED else REFUSED

    return apply


def _expire(lab: Lab, job: Job) -> str:
    due = lab.db.dialect.upkeep(lab.session, 100, ("default",))
    return MOVED if due.again + due.dead + due.unknown else REFUSED


def _by_hand(verb: Callable[[Lab, Job], State]) -> Apply:
    def apply(lab: Lab, job: Job) -> str:
        try:
            assert verb(lab, job) is State(job.row["state"])
        except IllegalMove:
            return REFUSED
        return MOVED

    return apply


def _cancel(lab: Lab, job: Job) -> State:
    return lab.db.run(lambda session: jobs.cancel(lab.db.dialect, session, job.id))


def _retry(lab: Lab, job: Job) -> State:
    return lab.db.run(lambda session: jobs.retry(lab.db.dialect, session, job.id))


def _resolve(state: State) -> Callable[[Lab, Job], State]:
    def resolve(lab: Lab, job: Job) -> State:
        seen = job.row.get("updated_at") or job.row["finished_at"]
        return lab.db.run(lambda session: jobs.resolve(lab.db.dialect, session, job.id, state, seen))

    return resolve


WAYS: dict[str, dict[str, Apply]] = {
    "claim": {"turn": _claim},
    "renew": {"verb": _by_renewing(Lab.renew), "turn": _by_renewing(Lab.renew_in_turn)},
    "succeed": _by_settling(State.SUCCEEDED),
    "ack": _by_settling(State.ACKED),
    "retry_later": _by_settling(State.PENDING, Kind.FAILED, summary="ValueError", delay=5_000_000),
    "release": _by_settling(State.PENDING, Kind.RELEASED, refund=True),
    "block": _by_settling(State.BLOCKED, Kind.UNKNOWN_TARGET, refund=True),
    "bury": _by_settling(State.DEAD, Kind.REJECTED),
    "crash": {
        "pending": _by_settling(State.PENDING, Kind.CRASHED, delay=5_000_000)["turn"],
        "unknown": _by_settling(State.UNKNOWN, Kind.CRASHED)["turn"],
        "dead": _by_settling(State.DEAD, Kind.CRASHED)["turn"],
    },
    "expire": {"upkeep": _expire},
    "cancel": {"by hand": _by_hand(_cancel)},
    "retry": {"by hand": _by_hand(_retry)},
    "resolve": {
        "succeeded": _by_hand(_resolve(State.SUCCEEDED)),
        "discarded": _by_hand(_resolve(State.DISCARDED)),
    },
}
FENCED = ("renew", "succeed", "ack", "retry_later", "release", "block", "bury", "crash")
WAYS_OF = [(verb, way) for verb in WAYS for way in WAYS[verb]]
FENCED_WAYS = [(verb, way) for verb, way in WAYS_OF if verb in FENCED]


def test_every_verb_is_tried() -> None:
    assert set(WAYS) == set(VERBS)


# -- the pairs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A job to try a verb on; ``late`` seconds have passed since it was made."""

    state: State
    columns: dict[str, Any] = field(default_factory=dict)
    late: float = 0.0


def starts(verb: str, state: State) -> list[Start]:
    """The job in this state, and those of its forms that may fare differently with the verb."""
    if verb == "expire" and state is State.RUNNING:
        return [
            Start(state, {}, 61),
            Start(state, {"attempt": 3}, 61),
            Start(state, {"on_crash": int(OnCrash.UNKNOWN)}, 61),
            Start(state, {"on_crash": int(OnCrash.UNKNOWN), "attempt": 3}, 61),
            Start(state, {"on_crash": int(OnCrash.FAIL)}, 61),
        ]
    return [Start(state), Start(state, {"key": "k", "attempt": 3, "payload": b"[1]"})]


@pytest.mark.req("D8", "D12", "D13")
@pytest.mark.parametrize(("verb", "way"), WAYS_OF)
def test_a_verb_moves_jobs_as_the_table_says_and_refuses_all_others(lab: Lab, verb: str, way: str) -> None:
    reached: dict[State, set[State]] = {}
    for state in State:
        for start in starts(verb, state):
            clear(lab.db)
            job, bystander = make(lab.db, state, **start.columns), make(lab.db, State.BLOCKED, queue="other")
            lab.db.clock.advance(start.late)
            before = rows(lab.db)
            with lab.db.session() as fresh:  # without marks: the clock was set back
                answer = WAYS[verb][way](Lab(lab.db, fresh), job)
            after = rows(lab.db)
            about = f"{verb} by {way} on {start}"
            if (verb, state) not in MOVES:
                assert answer == REFUSED, about
                assert after == before, about
                continue
            assert answer == MOVED, about
            after_state = after.state(job.id)
            assert after_state in MOVES[verb, state], about
            reached.setdefault(state, set()).add(after_state)
            assert len(after.jobs) + len(after.finished) == 2, about  # moved, not copied
            assert after.jobs[bystander.id] == before.jobs[bystander.id], about
    one = {State[way.upper()]} if verb in ("resolve", "crash") else None  # each of their ways leads to one state
    assert reached == {s: one or set(MOVES[verb, s]) for s in sources(verb)}


@pytest.mark.req("D8")
def test_a_job_that_waits_for_its_time_is_pending_and_not_claimable(lab: Lab) -> None:
    job = make(lab.db, run_at=now(lab.db) + 60_000_000)
    before = rows(lab.db)
    assert _claim(lab, job) == REFUSED
    assert _expire(lab, job) == REFUSED
    assert rows(lab.db) == before
    lab.db.clock.advance(61)
    assert lab.db.dialect.upkeep(lab.session, 100, ("default",)).promoted == 1
    assert _claim(lab, job) == MOVED


@pytest.mark.req("D12")
def test_a_running_job_is_not_swept_while_its_lease_lasts(lab: Lab) -> None:
    job = make(lab.db, State.RUNNING)
    before = rows(lab.db)
    lab.db.clock.advance(50)
    assert _expire(lab, job) == REFUSED
    assert rows(lab.db) == before


# -- the fence ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("D13")
@pytest.mark.parametrize(("verb", "way"), FENCED_WAYS)
def test_a_wrong_token_changes_nothing(lab: Lab, verb: str, way: str) -> None:
    job = make(lab.db, State.RUNNING)
    before = rows(lab.db)
    assert WAYS[verb][way](lab, Job(job.id, new_token(), job.row)) == REFUSED
    assert rows(lab.db) == before


@pytest.mark.req("D13", "H14")
@pytest.mark.parametrize(("verb", "way"), FENCED_WAYS)
def test_after_its_lease_the_right_token_changes_nothing(lab: Lab, verb: str, way: str) -> None:
    job = make(lab.db, State.RUNNING)
    before = rows(lab.db)
    lab.db.clock.advance(LEASE / 1e6 + 0.001)
    assert WAYS[verb][way](lab, job) == REFUSED
    assert rows(lab.db) == before


@pytest.mark.req("D12", "D13")
@pytest.mark.parametrize(("verb", "way"), FENCED_WAYS)
def test_the_token_of_an_earlier_claim_changes_nothing(lab: Lab, verb: str, way: str) -> None:
    old = make(lab.db, State.RUNNING)
    lab.db.clock.advance(61)
    assert _expire(lab, old) == MOVED
    taken = lab.db.dialect.turn(lab.session, claim_turn()).claimed[0]
    assert (taken.id, taken.attempt, taken.lapses) == (old.id, 2, 1)
    before = rows(lab.db)
    assert WAYS[verb][way](lab, old) == REFUSED
    assert rows(lab.db) == before
    assert WAYS[verb][way](lab, Job(taken.id, taken.token, old.row)) == MOVED
    ended = rows(lab.db)
    assert WAYS[verb][way](lab, old) == REFUSED
    assert rows(lab.db) == ended


@pytest.mark.req("D13")
@pytest.mark.parametrize("route", ["settle", "turn"])
def test_one_worker_that_holds_a_lost_and_a_new_claim_of_one_job_is_answered_for_each(lab: Lab, route: str) -> None:
    """A worker stalls past its lease, its upkeep takes the job back, and it claims the job again in another slot."""
    old = make(lab.db, State.RUNNING)
    lab.db.clock.advance(61)
    _expire(lab, old)
    taken = lab.db.dialect.turn(lab.session, claim_turn()).claimed[0]
    new = Job(taken.id, taken.token, old.row)
    renewals = [old.held, new.held]
    if route == "turn":
        assert lab.db.dialect.turn(lab.session, Turn(renewals=renewals, lease=LEASE)).renewed == [
            Fact.LOST,
            Fact.RENEWED,
        ]
    else:
        renewed = lab.db.run(lambda session: lab.db.dialect.renew(session, renewals, LEASE))
        assert renewed == [Fact.LOST, Fact.RENEWED]
    settlements = [old.settlement(State.DEAD, Kind.FAILED), new.settlement(State.ACKED)]
    if route == "turn":
        assert lab.db.dialect.turn(lab.session, Turn(settlements)).settled == [Fact.LOST, Fact.DONE]
    else:
        assert lab.db.run(lambda s: lab.db.dialect.settle(s, settlements)) == [Fact.LOST, Fact.DONE]
    assert rows(lab.db).state(old.id) is State.ACKED


SETTLED = [
    (State.SUCCEEDED, None, {}),
    (State.ACKED, None, {}),
    (State.DEAD, Kind.FAILED, {"summary": "ValueError"}),
    (State.BLOCKED, Kind.SCHEMA_MISMATCH, {"refund": True}),
    (State.PENDING, Kind.FAILED, {"delay": 60_000_000}),
    (State.PENDING, Kind.RELEASED, {"refund": True}),
]


@pytest.mark.req("D13")
@pytest.mark.parametrize("way", [Lab.settle, Lab.settle_in_turn])
@pytest.mark.parametrize(("state", "kind", "more"), SETTLED)
def test_a_settlement_that_is_asked_again_is_told_already(
    lab: Lab, state: State, kind: Kind | None, more: dict[str, Any], way: Callable[[Lab, Settlement], Fact]
) -> None:
    job = make(lab.db, State.RUNNING)
    settlement = job.settlement(state, kind, **more)
    assert way(lab, settlement) in (Fact.DONE, Fact.AGAIN)
    before = rows(lab.db)
    assert way(lab, settlement) is Fact.ALREADY
    other = State.ACKED if state is not State.ACKED else State.DEAD
    assert way(lab, job.settlement(other)) is Fact.LOST  # something else was settled
    assert way(lab, Settlement(job.id, new_token(), state, "default", kind, **more)) is Fact.LOST
    assert rows(lab.db) == before


@pytest.mark.req("D13")
@pytest.mark.parametrize("way", [Lab.settle, Lab.settle_in_turn])
def test_nobody_is_told_already_for_what_another_did(lab: Lab, way: Callable[[Lab, Settlement], Fact]) -> None:
    """Cancelled, expired and resolved jobs end without their executor: it has lost them, in whatever state it says."""
    cancelled, expired = make(lab.db, State.RUNNING), make(lab.db, State.RUNNING, attempt=3)
    unknown = make(lab.db, State.RUNNING, on_crash=int(OnCrash.UNKNOWN))
    _cancel(lab, cancelled)
    lab.db.clock.advance(61)
    _expire(lab, expired)
    found = rows(lab.db)
    assert found.state(expired.id) is State.DEAD
    seen = found.jobs[unknown.id]["updated_at"]
    lab.db.run(lambda session: jobs.resolve(lab.db.dialect, session, unknown.id, State.SUCCEEDED, seen))
    before = rows(lab.db)
    for job, state in [(cancelled, State.CANCELLED), (expired, State.DEAD), (unknown, State.SUCCEEDED)]:
        assert before.state(job.id) is state
        for settled in (state, State.SUCCEEDED, State.PENDING):
            assert way(lab, job.settlement(settled)) is Fact.LOST
    assert rows(lab.db) == before


@pytest.mark.req("D13")
def test_a_batch_settles_what_is_held_and_tells_the_rest(lab: Lab) -> None:
    """Fast and full path, in one statement with lost, repeated and wrong claims in between."""
    held = [make(lab.db, State.RUNNING) for _ in range(4)]
    gone = Job(new_id(), new_token(), held[0].row)
    done = make(lab.db, State.RUNNING)
    assert lab.settle(done.settlement(State.SUCCEEDED)) is Fact.DONE
    wrong = Job(held[3].id, new_token(), held[3].row)
    plain = [job.settlement(State.SUCCEEDED) for job in (held[0], gone, done, wrong)]
    facts = lab.db.dialect.turn(lab.session, Turn(plain)).settled
    assert facts[1:] == [Fact.LOST, Fact.ALREADY, Fact.LOST]
    assert facts[0] in (Fact.DONE, Fact.ALREADY)  # the fast path knows the count, and asks again for the facts
    mixed = [
        gone.settlement(State.SUCCEEDED),
        held[1].settlement(State.SUCCEEDED),
        done.settlement(State.SUCCEEDED),
        held[2].settlement(State.PENDING, Kind.FAILED),
        wrong.settlement(State.DEAD, Kind.FAILED),
    ]
    facts = lab.db.dialect.turn(lab.session, Turn(mixed)).settled
    assert facts == [Fact.LOST, Fact.DONE, Fact.ALREADY, Fact.AGAIN, Fact.LOST]
    after = rows(lab.db)
    ended = [after.state(job.id) for job in held]
    assert ended == [State.SUCCEEDED, State.SUCCEEDED, State.PENDING, State.RUNNING]


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("H7")
def test_resolving_is_refused_when_the_job_changed_since_it_was_read(lab: Lab) -> None:
    job = make(lab.db, State.UNKNOWN)
    set_columns(lab.db, job.id, updated_at=job.row["updated_at"] + 1)
    before = rows(lab.db)
    with pytest.raises(StaleUpdate):
        _resolve(State.DISCARDED)(lab, job)
    assert rows(lab.db) == before


@pytest.mark.parametrize("verb", [_cancel, _retry, _resolve(State.SUCCEEDED)])
def test_a_verb_by_hand_on_a_job_that_is_not_there(lab: Lab, verb: Callable[[Lab, Job], State]) -> None:
    with pytest.raises(JobNotFound):
        verb(lab, Job(new_id(), new_token(), {"updated_at": 1}))


def test_a_job_whose_payload_was_not_kept_cannot_be_retried(lab: Lab) -> None:
    job = make(lab.db, State.SUCCEEDED, payload=None)
    before = rows(lab.db)
    with pytest.raises(IllegalMove, match="payload"):
        _retry(lab, job)
    assert rows(lab.db) == before


@pytest.mark.req("D8")
@pytest.mark.parametrize("state", State)
def test_a_refusal_names_the_verbs_that_apply(lab: Lab, state: State) -> None:
    verbs = {"cancel": _cancel, "retry": _retry, "resolve": _resolve(State.SUCCEEDED)}
    apply = [verb for verb in verbs if (verb, state) in MOVES]
    for verb in verbs.keys() - apply:
        with pytest.raises(IllegalMove, match=f"is {state.label}: the verb '{verb}' does not apply") as caught:
            verbs[verb](lab, make(lab.db, state))
        told = " and ".join(apply) or "no verb left: enqueue a new job"
        assert str(caught.value).endswith(f"In this state there is {told}")


def test_a_discarded_job_is_refused_for_its_state_and_not_for_a_key(lab: Lab) -> None:
    job = make(lab.db, State.DISCARDED)
    with pytest.raises(IllegalMove, match="is discarded"):
        _retry(lab, job)
