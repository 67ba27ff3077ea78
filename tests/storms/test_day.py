"""A day in the life of a queue: hypothesis enqueues, crashes, cancels and lets hours pass, and steps real workers through it.

After every step of a worker all rows are read, and each must have moved only as a model in plain Python says that this step
may move it: settled as the run that this worker did demands, claimed when it was due, made due or taken back when its time had
come by the database's clock. What *must* have happened is asked whenever a worker says that it would sleep.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from dbqueue import DBQueue, clock
from dbqueue.clock import SECOND
from dbqueue.errors import IllegalMove, KeyTaken
from dbqueue.runtime.context import JobContext
from dbqueue.states import KEY_HOLDERS, OnCrash, State, allowed
from tests.factory import Row, Rows, clear, now, rows
from tests.storms.virtual import LEASE, POLL, SHUTDOWN, TIMEOUT, Hand, Handlers, Plan, move_time

HOUR, DAY = 3_600, 86_400
SLACK, STALL = 0.1, 10.0
"""Seconds: two looks at a clock in one step, and what a busy machine may add to a few steps."""
WORKERS = range(3)

WAITS: dict[str, list[float]] = {
    "steady": [60, 3600, 3600],
    "doubtful": [30, 120, 480, 1920],
    "brittle": [900, 900],
    "plain": [1, 2],
}
"""Seconds from each failed attempt to the next one; the last attempt is not in it."""
ON_CRASH = {
    "steady": OnCrash.RETRY, "doubtful": OnCrash.UNKNOWN, "brittle": OnCrash.FAIL, "plain": OnCrash.RETRY,
}  # fmt: skip

BLOWS = ("crash", "cut", "lost answer", "stop", "hurried stop")
ACTS = st.sampled_from(["ok", "fail", "fail", "later 0", "later 45", "later 7200", "bury", "linger", "linger"])


@dataclass
class Job:
    id: bytes
    target: str
    plan: Plan
    claims: int = 0
    unstarted: int = 0
    """Claims whose answer never reached the worker."""

    @property
    def max_attempts(self) -> int:
        return len(WAITS[self.target]) + 1


Claim = tuple[bytes, bytes]
"""Job and token: the claims of one turn have one token."""


@dataclass(frozen=True)
class Run:
    """A claim. Without a context it never began: its answer was lost."""

    worker: str
    act: str
    context: JobContext | None
    claimed_at: int

    @property
    def returned(self) -> bool:
        """It had, before the step that is looked at: none of those that linger return in the middle of a step."""
        return self.context is not None and (self.act != "linger" or self.context.is_cancelled)


@dataclass(frozen=True)
class Seen:
    """What of a row is compared: where a job may be after a step."""

    state: State
    attempt: int
    lapses: int
    ready: bool
    run_at: tuple[int, int]
    kind: str | None
    claimed: bool = False
    """By this step."""
    renewed: bool = False

    @classmethod
    def of(cls, row: Row) -> Seen:
        return cls(
            State(row["state"]), row["attempt"], row["lapses"], row.get("ready_at") is not None,
            (row["run_at"], row["run_at"]), row["error_kind"],
        )  # fmt: skip

    def fits(self, row: Row, old: Row) -> bool:
        found = Seen.of(row)
        same_claim = row["token"] == old["token"]
        return (
            replace(self, run_at=found.run_at, claimed=False, renewed=False) == found
            and self.run_at[0] <= row["run_at"] <= self.run_at[1]
            and (self.state is not State.RUNNING or self.claimed is not same_claim)
        )


def told(row: Row) -> str:
    names = ("state", "attempt", "lapses", "run_at", "ready_at", "lease_until", "error_kind", "worker", "token")
    return ", ".join(f"{name}={row.get(name)!r}" for name in names)


class DayMachine(RuleBasedStateMachine):
    queue: ClassVar[DBQueue]
    handlers: ClassVar[Handlers]
    facts: ClassVar[Counter[str]]
    span: ClassVar[float]
    """Seconds that pass in one example, at least."""

    def __init__(self) -> None:
        super().__init__()
        self.db = self.queue.database
        clear(self.db)
        self.handlers.runs.clear()
        self.handlers.lingering.clear()
        self.jobs: dict[bytes, Job] = {}
        self.ids: list[bytes] = []
        self.runs: dict[Claim, Run] = {}
        """Every claim that was ever seen."""
        self.hands = [self.hire() for _ in WORKERS]
        self.seen = Rows({}, {})
        self.at = self.began = now(self.db)
        """The database's clock at the last look, and before the last step."""
        self.answer_lost = False
        self.sound = True
        """The last look found nothing wrong."""
        self.facts["days"] += 1

    def hire(self) -> Hand:
        return Hand(self.queue, self.handlers, slots=3)

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def passed(self) -> float:
        return self.db.clock.offset / SECOND

    def advance(self, seconds: float) -> None:
        self.db.clock.advance(seconds)
        self.at += round(seconds * SECOND)

    # -- looking -----------------------------------------------------------------------------------------------------

    def look(self, may: Callable[[Job, Row, int, int], list[Seen]]) -> None:
        """Reads all rows. ``may`` says what a job may have become between the two instants; that it stayed as it was is no exception.
        Then what always holds."""
        self.sound = False
        since, before, after, until = self.at, self.seen, rows(self.db), now(self.db)
        unfinished, ended = set(after.jobs), [id_ for id_, _ in after.finished]
        assert len(unfinished) + len(ended) == len(self.jobs), "a job is lost, or there twice"
        assert unfinished | set(ended) == set(self.jobs)
        keys = Counter((r["target"], r["key"]) for r in after.jobs.values() if r["key"] and r["state"] in KEY_HOLDERS)
        assert not keys or max(keys.values()) == 1, "a key is held twice"
        for job in self.jobs.values():
            old, new = before.of(job.id), after.of(job.id)
            assert new is not None
            if old is None:
                assert (new["state"], new["attempt"], new["lapses"]) == (State.PENDING, 0, 0)
                continue
            ways = [seen for seen in may(job, old, since, until) if seen.fits(new, old)]
            assert ways, (
                f"{job}\nwas    {told(old)}\nbecame {told(new)}\nnot    "
                + "\n       ".join(map(str, may(job, old, since, until)))
                + f"\nbetween {since} and {until}"
            )
            self.moved(job, old, new, ways[0], since)
            self.lease_holds(old, new, ways[0], since, until)
        self.seen, self.at, self.sound = after, until, True

    def moved(self, job: Job, old: Row, new: Row, way: Seen, since: int) -> None:
        """Keeps count of claims, and compares them with what handlers ran."""
        if new["lapses"] > old["lapses"]:
            self.facts["lapses"] += 1
        if way.claimed:
            job.claims += 1
            assert new["started_at"] >= new["run_at"], "claimed before it was due"
            worker, contexts = str(new["worker"]), self.handlers.runs[job.id]
            begun = len(contexts) == job.claims - job.unstarted
            if not begun:
                assert self.answer_lost, "a claimed job was not run"
                job.unstarted += 1
                assert len(contexts) == job.claims - job.unstarted
            act = job.plan.act(len(contexts) - 1) if begun else "none"
            self.runs[job.id, new["token"]] = Run(worker, act, contexts[-1] if begun else None, new["started_at"])
            self.facts["runs" if begun else "claims lost with their answer"] += 1
        assert len(self.handlers.runs[job.id]) == job.claims - job.unstarted, "a job ran without a claim"
        assert new["attempt"] <= job.max_attempts

    def lease_holds(self, old: Row, new: Row, way: Seen, since: int, until: int) -> None:
        """A lease begins with the claim and grows only by its own worker, while it lives."""
        lease = round(LEASE * SECOND)
        if new["state"] != State.RUNNING:
            return
        if not way.claimed and new["lease_until"] == old["lease_until"]:
            return
        assert since + lease <= new["lease_until"] <= until + lease
        assert way.claimed or (way.renewed and old["lease_until"] > since)

    @staticmethod
    def stay(job: Job, old: Row, since: int, until: int) -> list[Seen]:
        return [Seen.of(old)]

    # -- what one step of a worker may do ----------------------------------------------------------------------------

    def may(self, hand: Hand, returned: set[Claim], *, connected: bool) -> Callable[[Job, Row, int, int], list[Seen]]:
        """``returned``: the claims whose runs had ended before the step. The order is a step's: settle or hand back, renew, claim,
        make due, take back."""

        def ways(job: Job, old: Row, since: int, until: int) -> list[Seen]:
            start = Seen.of(old)
            run = self.runs.get((job.id, old["token"])) if start.state is State.RUNNING else None
            mine = run is not None and run.worker == hand.name
            found, settled = [start], []
            if run is not None and mine and old["lease_until"] > since:
                if (job.id, old["token"]) in returned:
                    settled = self.verdicts(job, run, start, hand, since, until)
                    if connected and old["lease_until"] > until:
                        found = []  # it must be settled
                elif run.context is None:
                    settled = [replace(start, state=State.PENDING, attempt=start.attempt - 1, ready=True)]
            found = [replace(way, renewed=mine) for way in found] + settled
            for way in list(found):
                if way.state is State.PENDING and way.ready and not hand.worker.stopping.begun:
                    found.append(replace(way, state=State.RUNNING, attempt=way.attempt + 1, ready=False, claimed=True))
            for way in list(found):
                if way.state is State.PENDING and not way.ready and way.run_at[0] <= until:
                    found.append(replace(way, ready=True))
                elif way.state is State.RUNNING and not way.claimed and old["lease_until"] <= until:
                    found.append(self.lapsed(job, way))
            return found

        return ways

    def verdicts(self, job: Job, run: Run, start: Seen, hand: Hand, since: int, until: int) -> list[Seen]:
        """What the run's end makes of the job. Only a lingering run leaves a choice: which of the reasons to stop came first."""
        act, _, seconds = run.act.partition(" ")
        if act == "ok":
            return [replace(start, state=State.SUCCEEDED, kind=None, ready=False)]
        if act == "bury":
            return [replace(start, state=State.DEAD, kind="rejected")]
        if act == "fail":
            return [self.failed(job, start, "failed", None, since, until)]
        if act == "later":
            return [self.failed(job, start, "failed", float(seconds), since, until)]
        assert act == "linger"
        found, age = [], (until - run.claimed_at) / SECOND
        if age >= TIMEOUT - SLACK:
            found.append(self.failed(job, start, "timeout", None, since, until))
        if hand.worker.stopping.begun or age >= LEASE - SLACK:
            found.append(replace(start, state=State.PENDING, attempt=start.attempt - 1, kind="released", ready=True))
        return found

    def failed(self, job: Job, start: Seen, kind: str, delay: float | None, since: int, until: int) -> Seen:
        if start.attempt >= job.max_attempts:
            return replace(start, state=State.DEAD, kind=kind)
        wait = round((WAITS[job.target][start.attempt - 1] if delay is None else delay) * SECOND)
        run_at = (since + wait, until + wait)
        return replace(start, state=State.PENDING, kind=kind, ready=wait == 0, run_at=run_at)

    @staticmethod
    def lapsed(job: Job, way: Seen) -> Seen:
        on_crash, following = ON_CRASH[job.target], State.PENDING
        if on_crash is OnCrash.UNKNOWN:
            following = State.UNKNOWN
        elif on_crash is OnCrash.FAIL or way.attempt >= job.max_attempts:
            following = State.DEAD
        ready = following is State.PENDING
        return replace(way, state=following, lapses=way.lapses + 1, ready=ready, kind="crashed", renewed=False)

    # -- workers -----------------------------------------------------------------------------------------------------

    def step(self, hand: Hand) -> float:
        returned = {claim for claim, run in self.runs.items() if run.worker == hand.name and run.returned}
        connected, self.began = hand.connected, self.at
        pause = hand.step()
        self.facts["steps"] += 1
        self.look(self.may(hand, returned, connected=connected and hand.connected))
        self.answer_lost = False
        return pause

    def work(self, hand: Hand) -> float:
        """Steps it as its loop would, until it is connected and would sleep; returns for how long."""
        for _ in range(300):
            pause = self.step(hand)
            if hand.worker.finished:
                return 0.0
            if pause > 0.05 and hand.connected:
                self.nothing_is_late(hand, pause)
                return pause
            self.advance(pause)
        raise AssertionError("the worker never sleeps")

    def nothing_is_late(self, hand: Hand, pause: float) -> None:
        """It would sleep now: whatever was due a poll ago has been begun, every lost lease was found, its own claims are safe. Nor
        would it sleep for too long."""
        if not hand.connected or hand.worker.stopping.begun:
            return
        for row in self.seen.jobs.values():
            due = row["run_at"] if row["ready_at"] is None else row["ready_at"]
            if row["state"] == State.PENDING and hand.worker.slots.idle:
                assert due > self.began - (POLL + SLACK) * SECOND, f"it waits longer than it must: {told(row)}"
                assert due + (POLL + SLACK) * SECOND > self.began + pause * SECOND, (
                    f"it will wait too long: {told(row)}"
                )
            elif row["state"] == State.RUNNING:
                left = (row["lease_until"] - self.began) / SECOND
                assert left > -1 - SLACK, f"a lost lease was not noticed: {told(row)}"
                run = self.runs[row["id"], row["token"]]
                if run.worker != hand.name:
                    continue
                assert run.context is not None, f"a claim that it does not know of was not handed back: {told(row)}"
                if not run.context.is_cancelled:
                    assert left > LEASE * 2 / 3 - SLACK, f"its lease is not renewed in time: {told(row)}"
                    age = (self.began - run.claimed_at) / SECOND
                    assert age < TIMEOUT + STALL, f"it outlives its timeout: {told(row)}"

    # Few rules with many sides: hypothesis leaves whole rules out of an example, and likes to repeat one.

    @rule(number=st.sampled_from(WORKERS), how=st.sampled_from(["once", "until idle", "until idle", "by itself"]))
    def let_work(self, number: int, how: str) -> None:
        """Once: what it claims now is not settled before it is stepped again, which may be too late. By itself: for some of its own
        sleeps it alone decides when it is stepped."""
        hand = self.hands[number]
        if how == "once":
            self.step(hand)
            return
        pause = self.work(hand)
        for _ in range(8 if how == "by itself" else 0):
            self.advance(min(pause, LEASE))
            pause = self.work(hand)

    @rule(number=st.sampled_from(WORKERS), blow=st.sampled_from(BLOWS))
    def strike(self, number: int, blow: str) -> None:
        hand = self.hands[number]
        self.facts[blow] += 1
        if blow == "cut":
            hand.cut()
        elif blow == "lost answer":
            self.answer_lost = True
            hand.lose_answer()
            self.step(hand)
            hand.keep_answers()
        else:
            if blow != "crash":
                self.stop(hand, hurried=blow == "hurried stop")
            hand.end()
            self.hands[number] = self.hire()
            self.look(self.stay)

    def stop(self, hand: Hand, *, hurried: bool) -> None:
        """It hands back what is left when its patience is over, and at once if it was asked twice."""
        asked_at, connected = self.at, hand.connected
        hand.worker.stop()
        if hurried:
            hand.worker.stop()
        for _ in range(300):
            pause = self.step(hand)
            if hand.worker.finished:
                break
            self.advance(pause)
        assert hand.worker.finished, "the worker did not stop"
        self.facts["handed back"] += hand.worker.claims.released
        if connected:
            assert (self.at - asked_at) / SECOND < (1 if hurried else SHUTDOWN + 1) + STALL, "it took its time"
            mine = [row for row in self.seen.jobs.values() if row["worker"] == hand.name]
            assert not any(row["state"] == State.RUNNING and row["lease_until"] > self.at for row in mine)

    # -- producers ---------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Something is under way from the beginning: claims that are not settled, jobs that linger, and one whose retry comes due
        while a worker watches that has slots to spare."""
        for name in WAITS:
            first = ["linger"] if ON_CRASH[name] is not OnCrash.RETRY else ["fail", "fail"]
            self.enqueue(name, [first, ["fail", "ok"], ["ok"]], 0, False, None, 4)
        self.step(self.hands[0])
        self.let_work(1, "by itself")

    @rule(
        name=st.sampled_from(list(WAITS)),
        plans=st.lists(st.lists(ACTS, min_size=1, max_size=5), min_size=1, max_size=3),
        delay=st.sampled_from([0, 0, 0, 20, 600, 4 * HOUR]),
        eta=st.booleans(),
        key=st.sampled_from([None, None, "a", "b"]),
        priority=st.sampled_from([0, 4, 9]),
    )
    def enqueue(self, name: str, plans: list[list[str]], delay: int, eta: bool, key: str | None, priority: int) -> None:
        """An ETA, too, is by the database's clock."""
        holder = self.holder(name, key)
        for acts in plans:
            since = now(self.db)
            more: dict[str, Any] = {"delay": delay}
            if eta:
                more = {"run_at": clock.to_datetime(since + delay * SECOND)}
            ref = self.handlers.targets[name].enqueue(Plan(acts), key=key, priority=priority, **more)
            assert (ref.duplicate, ref.id.bytes) == (holder is not None, holder or ref.id.bytes)
            if holder is None:
                self.jobs[ref.id.bytes] = Job(ref.id.bytes, name, Plan(acts))
                self.ids.append(ref.id.bytes)
                holder = ref.id.bytes if key is not None else None
                self.facts["jobs"] += 1
            self.look(self.stay)
            row = self.seen.jobs[ref.id.bytes]
            if ref.duplicate is False:
                assert since + delay * SECOND <= row["run_at"] <= self.at + delay * SECOND
                assert (row["run_at"] == since + delay * SECOND) if eta else True

    def holder(self, target: str, key: str | None) -> bytes | None:
        found = [
            id_ for id_, row in self.seen.jobs.items()
            if key is not None and (row["target"], row["key"]) == (target, key) and row["state"] in KEY_HOLDERS
        ]  # fmt: skip
        return found[0] if found else None

    # -- by hand -----------------------------------------------------------------------------------------------------

    @rule(
        verb=st.sampled_from(["retry", "cancel", "retry", "resolve"]),
        number=st.integers(0, 99),
        fits=st.sampled_from([True, True, False]),
        outcome=st.sampled_from([State.SUCCEEDED, State.DISCARDED]),
    )
    def by_hand(self, verb: str, number: int, fits: bool, outcome: State) -> None:
        """``number`` chooses a job; ``fits``: of those that the verb is for. What is drawn must not depend on what workers did."""
        states = {id_: State(self.row(id_)["state"]) for id_ in self.ids}
        fitting = [id_ for id_ in self.ids if allowed(verb, states[id_])]
        among = (fits and fitting) or self.ids
        chosen = among[number % len(among)]
        row, job_id = self.row(chosen), UUID(bytes=chosen)
        refused: type[Exception] | None = None if allowed(verb, states[chosen]) else IllegalMove
        after = Seen.of(row)
        call: Callable[[], str]
        if verb == "cancel":
            after = replace(after, state=State.CANCELLED, ready=False)
            call = partial(self.queue.cancel, job_id)
        elif verb == "resolve":
            after = replace(after, state=outcome)
            read = clock.to_datetime(row["updated_at"] if states[chosen] is State.UNKNOWN else row["created_at"])
            call = partial(self.queue.resolve, job_id, outcome.label, read)
        else:
            if refused is None and row["payload"] is None:
                refused = IllegalMove
            elif refused is None and self.holder(row["target"], row["key"]) is not None:
                refused = KeyTaken
            soon = (self.at, self.at + 10 * SECOND)
            after = replace(after, state=State.PENDING, attempt=0, lapses=0, ready=True, run_at=soon)
            call = partial(self.queue.retry, job_id)
        if refused is not None:
            with pytest.raises(refused):
                call()
            self.look(self.stay)
            return
        assert call() == states[chosen].label
        self.look(lambda job, old, since, until: [after] if job.id == chosen else [Seen.of(old)])
        self.facts[verb] += 1

    def row(self, job_id: bytes) -> Row:
        found = self.seen.of(job_id)
        assert found is not None
        return found

    # -- the day -----------------------------------------------------------------------------------------------------

    @rule(
        seconds=st.sampled_from([1, 10, 25, 40, 70, 600, HOUR, HOUR, 2 * HOUR, 4 * HOUR]),
        stalled=st.sampled_from([None, *WORKERS]),
        awake=st.sampled_from([None, *WORKERS]),
    )
    def pass_time(self, seconds: int, stalled: int | None, awake: int | None) -> None:
        """Nobody works meanwhile: the machine slept. One worker may be caught in the middle of something, and one may be the first
        to be there again."""
        if stalled is not None:
            self.step(self.hands[stalled])
        self.advance(seconds)
        if awake is not None:
            self.work(self.hands[awake])

    def teardown(self) -> None:
        """The rest of the day, an hour at a time, and then on until nothing is left that time alone can bring to its end."""
        try:
            if not self.sound:
                return
            while self.passed < self.span or self.waiting():
                for hand in self.hands:
                    self.advance(self.work(hand))
                self.advance(min(HOUR, self.next_due()))
                assert self.passed < self.span + 10 * DAY, "some job never ends"
            self.reckon()
        finally:
            for hand in self.hands:
                hand.end()
            self.facts["hours"] += round(self.passed / HOUR)

    def waiting(self) -> bool:
        return any(row["state"] in (State.PENDING, State.RUNNING) for row in self.seen.jobs.values())

    def next_due(self) -> float:
        """Lingering jobs want their timeouts noticed while their leases live."""
        running = any(row["state"] == State.RUNNING for row in self.seen.jobs.values())
        return LEASE / 4 if running else HOUR

    def reckon(self) -> None:
        """Every job is where its runs have brought it."""
        for job in self.jobs.values():
            row = self.row(job.id)
            state, contexts = State(row["state"]), self.handlers.runs[job.id]
            assert len(contexts) == job.claims - job.unstarted
            last = job.plan.act(len(contexts) - 1) if contexts else None
            if state is State.SUCCEEDED and row["token"] is not None:
                assert last == "ok"
            elif state is State.DEAD and row["error_kind"] == "rejected":
                assert last == "bury"
            elif state is State.DEAD and row["error_kind"] in ("failed", "timeout"):
                assert row["attempt"] == job.max_attempts
            elif state is State.DEAD:
                assert row["error_kind"] == "crashed"
                assert row["attempt"] == job.max_attempts or ON_CRASH[job.target] is OnCrash.FAIL
            elif state is State.UNKNOWN:
                assert ON_CRASH[job.target] is OnCrash.UNKNOWN
            else:
                assert state in (State.CANCELLED, State.DISCARDED, State.SUCCEEDED)
            self.facts[state.label] += 1


@contextmanager
def day(url: str, monkeypatch: pytest.MonkeyPatch, span: float) -> Iterator[type[DayMachine]]:
    """History is kept for ever: a job that was pruned and one that was lost look alike."""
    with closing(DBQueue(url, lease=LEASE, poll=POLL, history=3_650 * DAY)) as queue:
        queue.database.ready()
        handlers = Handlers()
        handlers.declare(queue)
        move_time(monkeypatch, queue.database.clock)
        yield type(
            "DayMachine", (DayMachine,), {"queue": queue, "handlers": handlers, "facts": Counter(), "span": span}
        )


def play(machine: type[DayMachine], examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # time passes by itself, too: what is found is told at once and not made smaller
    )
    run_state_machine_as_test(machine, settings=chosen)
    print(machine.queue.database.dialect.name, dict(machine.facts))


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of handlers raise here."""
    caplog.set_level(logging.CRITICAL, "dbqueue.jobs")


@pytest.mark.req("D7", "D8", "D12", "D13", "D14", "H14")
def test_some_hours(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with day(database_url, monkeypatch, 6 * HOUR) as machine:
        play(seed(34)(machine), 14, 30)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.req("D7", "D8", "D12", "D13", "D14", "H14")
def test_whole_days(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with day(database_url, monkeypatch, DAY) as machine:
        play(machine, 30, 100)
        assert machine.facts["hours"] >= 24 * 30
        for what in (*BLOWS, "runs", "handed back", "lapses", "cancel", "retry"):
            assert machine.facts[what], f"no {what} in all these days"
