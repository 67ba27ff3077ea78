"""Hypothesis plays workers, crashes, clock jumps and operators against a model in a dict, and looks at every row after each step.

Time in the model is the offset that the database's clock is given. It only moves in whole steps, and every lease and delay ends
in the middle of one, so the real seconds of a run decide nothing. A crash is a worker that never comes back to its claims; a
lost lease is one that comes back too late: every claim that was ever made is kept and may be settled or renewed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dbqueue.clock import SECOND
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import ClaimRequest, Enqueued, Fact, Held, Settlement, Turn
from dbqueue.ids import new_token
from dbqueue.states import KEY_HOLDERS, Kind, OnCrash, State, allowed
from tests.factory import Rows, clear, new_job, now, rows
from tests.waiting import wait_for

STEP = 100 * SECOND
HALF = STEP // 2
LEASES = (HALF, STEP + HALF)
DELAYS = (0, HALF, 2 * STEP + HALF)
QUEUES = ("red", "blue")
WORKERS = range(3)


@dataclass
class Job:
    """What the database must say about one job. Instants are offsets of the clock."""

    id: bytes
    queue: str
    priority: int
    key: str | None
    max_attempts: int
    on_crash: OnCrash
    run_at: int
    ready: bool
    state: State = State.PENDING
    attempt: int = 0
    lapses: int = 0
    token: bytes | None = None
    lease_until: int = 0
    renewed_at: int = 0
    settled: tuple[bytes, State] | None = None
    """The last settlement, as long as nothing else happened to the job."""
    payload: bool = True
    ended_at: int = 0


@dataclass(frozen=True)
class Claim:
    id: bytes
    token: bytes
    worker: int
    last: bool


@dataclass(frozen=True)
class Outcome:
    state: State
    kind: Kind | None = None
    refund: bool = False
    delay: int = 0


OUTCOMES = st.one_of(
    st.just(Outcome(State.SUCCEEDED)),
    st.sampled_from(
        [
            Outcome(State.ACKED),
            Outcome(State.DEAD, Kind.FAILED),
            Outcome(State.BLOCKED, Kind.UNKNOWN_TARGET, refund=True),
            Outcome(State.PENDING, Kind.RELEASED, refund=True),
            *(Outcome(State.PENDING, Kind.FAILED, delay=delay) for delay in DELAYS),
        ]
    ),
)
KEYS = st.sampled_from([None, None, "a", "b"])


class QueueMachine(RuleBasedStateMachine):
    db: ClassVar[Database]

    def __init__(self) -> None:
        super().__init__()
        clear(self.db)
        self.dialect = self.db.dialect
        self.sessions: list[OwnSession] = [self.db.open_session() for _ in WORKERS]
        self.model: dict[bytes, Job] = {}
        self.ids: list[bytes] = []
        self.claims: list[Claim] = []
        self.start = now(self.db)
        self.seen = Rows({}, {})
        self.touched: set[bytes] = set()

    @property
    def clock(self) -> int:
        return self.db.clock.offset

    def touch(self, job: Job) -> Job:
        self.touched.add(job.id)
        return job

    def holder(self, key: str | None) -> Job | None:
        found = [job for job in self.model.values() if key is not None and job.key == key and job.state in KEY_HOLDERS]
        assert len(found) <= 1
        return found[0] if found else None

    # -- producers -------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Claims of every kind are under way: it takes few steps from here to whatever may happen to one."""
        for on_crash, key in zip(OnCrash, ("a", "b", None), strict=True):
            self.enqueue(QUEUES[0], 4, [key, None], 0, 2, on_crash, many=True)
        self.the_tables_say_what_the_model_says()
        self.claim(0, 4, QUEUES, HALF, False)

    @rule(
        queue=st.sampled_from(QUEUES),
        priority=st.sampled_from([0, 4, 9]),
        keys=st.lists(KEYS, min_size=1, max_size=3),
        delay=st.sampled_from(DELAYS),
        max_attempts=st.integers(1, 3),
        on_crash=st.sampled_from(OnCrash),
        many=st.booleans(),
    )
    def enqueue(
        self,
        queue: str,
        priority: int,
        keys: list[str | None],
        delay: int,
        max_attempts: int,
        on_crash: OnCrash,
        many: bool,
    ) -> None:
        common: dict[str, Any] = {
            "queue": queue, "priority": priority, "delay": delay, "max_attempts": max_attempts, "on_crash": on_crash,
        }  # fmt: skip
        batch = [new_job(key=key, **common) for key in keys]

        def verb(session: OwnSession) -> list[Enqueued]:
            if many:
                return self.dialect.enqueue_many(session, batch)
            return [self.dialect.enqueue(session, job) for job in batch]

        for answer, new in zip(self.db.run(verb), batch, strict=True):
            holder = self.holder(new.key)
            assert (answer.id, answer.duplicate) == (holder.id if holder else new.id, holder is not None)
            if holder is None:
                self.ids.append(new.id)
                self.model[new.id] = self.touch(
                    Job(new.id, queue, priority, new.key, max_attempts, on_crash, self.clock + delay, ready=delay == 0)
                )

    # -- workers ---------------------------------------------------------------------------------------------------------

    def _await_sweep(self, worker: int, probe: str) -> None:
        """PostgreSQL starts at marks in between: wait until the next look is a whole one."""
        marks = getattr(self.sessions[worker], "marks", None)
        if marks is not None:
            wait_for(lambda: marks.sweep_due(probe))

    def _claimable(self, queues: Iterable[str]) -> list[bytes]:
        ready = [row for row in self.seen.jobs.values() if row["ready_at"] is not None]
        assert {row["id"] for row in ready} == {job.id for job in self.model.values() if job.ready}
        best = sorted(ready, key=lambda row: (row["priority"], row["ready_at"], row["id"]))
        return [row["id"] for queue in queues for row in best if row["queue"] == queue]

    @rule(
        worker=st.sampled_from(WORKERS),
        limit=st.sampled_from([1, 2, 4]),
        queues=st.sampled_from([QUEUES, QUEUES[::-1], QUEUES[:1]]),
        lease=st.sampled_from(LEASES),
        hurried=st.sampled_from([False, False, True]),
    )
    def claim(self, worker: int, limit: int, queues: tuple[str, ...], lease: int, hurried: bool) -> None:
        if not hurried:
            self._await_sweep(worker, "claim")
        token, expected = new_token(), self._claimable(queues)
        request = ClaimRequest(queues, limit, f"worker {worker}", token, lease)
        claimed = self.dialect.turn(self.sessions[worker], Turn(lease=lease, claim=request)).claimed
        ids = [row.id for row in claimed]
        if hurried and self.dialect.name == "postgresql":
            assert len(set(ids)) == len(ids) <= limit
            assert set(ids) <= set(expected)
        else:
            assert ids == expected[:limit]
        for row in claimed:
            job = self.touch(self.model[row.id])
            job.state, job.ready, job.attempt, job.settled = State.RUNNING, False, job.attempt + 1, None
            job.token, job.renewed_at, job.lease_until = token, self.clock, self.clock + lease
            assert (row.token, row.attempt, row.lapses, row.key) == (token, job.attempt, job.lapses, job.key)
        self.claims += [Claim(row.id, token, worker, row.attempt >= row.max_attempts) for row in claimed]

    def _owns(self, claim: Claim) -> bool:
        job = self.model.get(claim.id)
        return (
            job is not None and job.state is State.RUNNING and job.token == claim.token and job.lease_until > self.clock
        )

    def _draw_claims(self, data: st.DataObject) -> list[Claim]:
        """Live ones as a rule, and any that ever was."""
        live = [claim for claim in self.claims if self._owns(claim)]
        pool = live if live and data.draw(st.sampled_from([True, True, False])) else self.claims
        return data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4, unique=True))

    @precondition(lambda self: self.claims)
    @rule(worker=st.sampled_from(WORKERS), data=st.data(), in_turn=st.booleans())
    def settle_some(self, worker: int, data: st.DataObject, in_turn: bool) -> None:
        self.settle(worker, [(claim, data.draw(OUTCOMES)) for claim in self._draw_claims(data)], in_turn)

    def settle(self, worker: int, asked: list[tuple[Claim, Outcome]], in_turn: bool) -> None:
        # Attempts are the executor's to count: on the last one it says dead.
        asked = [
            (claim, Outcome(State.DEAD, o.kind) if o.state is State.PENDING and claim.last and not o.refund else o)
            for claim, o in asked
        ]
        batch = [
            Settlement(claim.id, claim.token, o.state, "red", o.kind, None, o.delay, o.refund) for claim, o in asked
        ]
        if in_turn:
            facts = self.dialect.turn(self.sessions[worker], Turn(batch)).settled
        else:
            facts = self.db.run(lambda session: self.dialect.settle(session, batch))
        plain = in_turn and all(settlement.plain for settlement in batch)
        for (claim, outcome), fact in zip(asked, facts, strict=True):
            job = self.model.get(claim.id)
            if job is None or not self._owns(claim):
                repeated = job is not None and job.settled == (claim.token, outcome.state)
                assert fact is (Fact.ALREADY if repeated else Fact.LOST)
                continue
            if outcome.state is State.PENDING:
                assert fact is Fact.AGAIN
            else:
                assert fact is Fact.DONE or (plain and fact is Fact.ALREADY)
            self._settled(self.touch(job), claim, outcome)

    def _settled(self, job: Job, claim: Claim, outcome: Outcome) -> None:
        job.state, job.settled, job.ended_at = outcome.state, (claim.token, outcome.state), self.clock
        job.attempt -= outcome.refund
        job.payload = outcome.state not in (State.SUCCEEDED, State.ACKED)
        if outcome.state is State.PENDING:
            job.ready = outcome.delay == 0
            if not outcome.refund:
                job.run_at = self.clock + outcome.delay

    @precondition(lambda self: self.claims)
    @rule(worker=st.sampled_from(WORKERS), data=st.data(), lease=st.sampled_from(LEASES), in_turn=st.booleans())
    def renew(self, worker: int, data: st.DataObject, lease: int, in_turn: bool) -> None:
        asked = self._draw_claims(data)
        held = [Held(claim.id, claim.token) for claim in asked]
        if in_turn:
            facts = self.dialect.turn(self.sessions[worker], Turn(renewals=held, lease=lease)).renewed
        else:
            facts = self.db.run(lambda session: self.dialect.renew(session, held, lease))
        for claim, fact in zip(asked, facts, strict=True):
            assert fact is (Fact.RENEWED if self._owns(claim) else Fact.LOST)
            if fact is Fact.RENEWED:
                job = self.touch(self.model[claim.id])
                job.renewed_at, job.lease_until = self.clock, self.clock + lease

    @precondition(lambda self: self.claims)
    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def come_back_from_a_lost_connection(self, worker: int, data: st.DataObject) -> None:
        self.sessions[worker].close()
        self.sessions[worker] = self.db.open_session()
        kept = [Held(claim.id, claim.token) for claim in self._draw_claims(data)]
        known = {(held.id, held.token) for held in kept}
        name = f"worker {worker}"
        lost = [
            id_
            for id_, row in self.seen.jobs.items()
            if (row["worker"], row["state"]) == (name, State.RUNNING)
            and (id_, row["token"]) not in known
            and self.model[id_].lease_until > self.clock
        ]
        assert self.dialect.release_unknown(self.sessions[worker], name, kept) == len(lost)
        for job_id in lost:
            job = self.touch(self.model[job_id])
            job.state, job.ready, job.attempt = State.PENDING, True, job.attempt - 1

    # -- time and upkeep -------------------------------------------------------------------------------------------------

    @rule(steps=st.sampled_from([0, 1, 1, 2, 3, -1, -3]), worker=st.one_of(st.none(), st.sampled_from(WORKERS)))
    def pass_time(self, steps: int, worker: int | None) -> None:
        self.db.clock.offset += steps * STEP
        if worker is not None:
            self.upkeep(worker)

    def upkeep(self, worker: int) -> None:
        self._await_sweep(worker, "upkeep")
        self.shorten(worker)
        due = self.dialect.upkeep(self.sessions[worker], 100, QUEUES)
        found = {"promoted": 0, "again": 0, "dead": 0, "unknown": 0}
        for job in self.model.values():
            if job.state is State.PENDING and not job.ready and job.run_at <= self.clock:
                self.touch(job).ready = True
                found["promoted"] += 1
            elif job.state is State.RUNNING and job.lease_until <= self.clock:
                self.touch(job).lapses += 1
                job.ended_at = self.clock
                if job.on_crash is OnCrash.UNKNOWN:
                    job.state = State.UNKNOWN
                    found["unknown"] += 1
                elif job.on_crash is OnCrash.FAIL or job.attempt >= job.max_attempts:
                    job.state = State.DEAD
                    found["dead"] += 1
                else:
                    job.state, job.ready = State.PENDING, True
                    found["again"] += 1
        assert {name: getattr(due, name) for name in found} == found
        waiting = [job.run_at for job in self.model.values() if job.state is State.PENDING and not job.ready]
        self._about(due.next_run, min(waiting, default=None))

    def shorten(self, worker: int) -> None:
        """What upkeep does first, where the clock went back since this session looked, or the session is new."""
        session: Any = self.sessions[worker]
        getattr(session, "marks", session).shortened = False
        for job in self.model.values():
            if job.state is State.RUNNING and job.renewed_at > self.clock:
                self.touch(job).lease_until -= job.renewed_at - self.clock
                job.renewed_at = self.clock

    def prune(self) -> None:
        states = [State.SUCCEEDED, State.DEAD, State.DISCARDED]
        old = [job for job in self.model.values() if job.state in states and job.ended_at <= self.clock]
        before = now(self.db) + HALF // 2
        assert self.db.run(lambda session: self.dialect.prune(session, states, before, 100)) == len(old)
        for job in old:
            self.touched.add(job.id)
            del self.model[job.id]

    # -- by hand ---------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), verb=st.sampled_from(["cancel", "retry", "retry", "resolve", "resolve", "prune"]))
    def by_hand(self, data: st.DataObject, verb: str) -> None:
        if verb == "prune":
            self.prune()
            return
        fitting = [job.id for job in self.model.values() if allowed(verb, job.state)]
        job_id: bytes = data.draw(st.sampled_from((data.draw(st.booleans()) and fitting) or self.ids))
        if verb == "resolve":
            self.resolve(
                job_id, data.draw(st.sampled_from([State.SUCCEEDED, State.DISCARDED])), data.draw(st.booleans())
            )
        else:
            getattr(self, verb)(job_id)

    def cancel(self, job_id: bytes) -> None:
        job = self.model.get(job_id)
        answer = self.db.run(lambda session: self.dialect.cancel(session, job_id))
        assert answer.found is (job and job.state)
        assert answer.moved is (job is not None and job.state in (State.PENDING, State.RUNNING, State.BLOCKED))
        if job is not None and answer.moved:
            self.touch(job).state = State.CANCELLED
            job.ready, job.settled, job.ended_at = False, None, self.clock

    def retry(self, job_id: bytes) -> None:
        job = self.model.get(job_id)
        answer = self.db.run(lambda session: self.dialect.retry(session, job_id))
        assert answer.found is (job and job.state)
        if job is None or not allowed("retry", job.state):
            assert (answer.moved, answer.reason) == (False, None)
            return
        reason = "payload" if not job.payload else "key" if self.holder(job.key) else None
        assert (answer.moved, answer.reason) == (reason is None, reason)
        if answer.moved:
            fresh = job.state is not State.BLOCKED
            self.touch(job)
            if fresh or job.attempt >= job.max_attempts:
                job.attempt = 0
            if fresh:
                job.lapses = 0
            job.state, job.ready, job.run_at, job.settled = State.PENDING, True, self.clock, None

    def resolve(self, job_id: bytes, state: State, late: bool) -> None:
        job = self.model.get(job_id)
        row = self.seen.jobs.get(job_id)
        read = row["updated_at"] - late if row else 1
        answer = self.db.run(lambda session: self.dialect.resolve(session, job_id, state, read))
        assert answer.found is (job and job.state)
        assert answer.moved is (job is not None and job.state is State.UNKNOWN and not late)
        if job is not None and answer.moved:
            self.touch(job).state, job.ended_at = state, self.clock

    # -- what must hold --------------------------------------------------------------------------------------------------

    def _about(self, instant: int | None, offset: int | None) -> None:
        assert (instant is None) == (offset is None)
        if instant is not None and offset is not None:
            assert 0 <= instant - self.start - offset < HALF

    @invariant()
    def the_tables_say_what_the_model_says(self) -> None:
        before, after = self.seen, rows(self.db)
        unfinished = {job.id for job in self.model.values() if not job.state.finished}
        assert set(after.jobs) == unfinished
        ended = [id_ for id_, _ in after.finished]
        assert sorted(ended) == sorted(set(self.model) - unfinished)
        for job in self.model.values():
            row = after.of(job.id)
            assert row is not None
            if job.id not in self.touched:
                assert row == before.of(job.id)
                continue
            assert (row["state"], row["attempt"], row["lapses"]) == (job.state, job.attempt, job.lapses)
            assert (row["queue"], row["priority"], row["key"]) == (job.queue, job.priority, job.key)
            assert (row["payload"] is not None) == job.payload
            self._about(row["run_at"], job.run_at)
            if job.state.finished:
                self._about(row["finished_at"], job.ended_at)
                continue
            assert (row["ready_at"] is not None) == job.ready
            if job.state is State.RUNNING:
                assert row["token"] == job.token
                self._about(row["lease_until"], job.lease_until)
        self.seen, self.touched = after, set()

    def teardown(self) -> None:
        """No job is stuck: once all leases and delays are over, everything that may run does, and ends."""
        try:
            self.db.clock.offset = 100 * STEP
            self.upkeep(0)
            self.the_tables_say_what_the_model_says()
            while any(job.state is State.PENDING for job in self.model.values()):
                claims = len(self.claims)
                self.claim(1, 4, QUEUES, LEASES[0], False)
                assert len(self.claims) > claims
                self.settle(2, [(claim, Outcome(State.SUCCEEDED)) for claim in self.claims[claims:]], True)
                self.the_tables_say_what_the_model_says()
            left = {job.state for job in self.model.values()}
            assert not left & {State.PENDING, State.RUNNING}
        finally:
            for session in self.sessions:
                session.close()


def play(db: Database, examples: int, steps: int, number: int | None = None) -> None:
    machine = type("QueueMachine", (QueueMachine,), {"db": db})
    if number is not None:
        machine = seed(number)(machine)  # the same games in every run; `derandomize` plays far duller ones
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Shrinking a failure takes minutes on PostgreSQL; SQLite finds most of them, too, and shrinks in seconds.
        phases=[Phase.generate, Phase.shrink] if db.dialect.name == "sqlite" else [Phase.generate],
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.req("D7", "D8", "D12", "D13", "D14", "H14")
def test_the_verbs_do_what_a_dict_does(db: Database) -> None:
    play(db, 100 if db.dialect.name == "sqlite" else 25, 30, number=2)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.req("D7", "D8", "D12", "D13", "D14", "H14")
def test_the_verbs_do_what_a_dict_does_for_a_long_time(db: Database) -> None:
    play(db, 2_000 if db.dialect.name == "sqlite" else 300, 50)
