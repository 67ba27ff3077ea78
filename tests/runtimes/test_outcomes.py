"""What becomes of a job whose handler fails, or that must not run at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from dbqueue import Backoff, Bury, DBQueue, JobError, RetryLater, current_job, events
from dbqueue.runtime.worker import EXIT_ABANDONED
from tests.factory import set_columns
from tests.runtimes.lab import Told, drained, in_thread, record, wait_state
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]


@dataclass(frozen=True)
class Number:
    n: int


@dataclass(frozen=True)
class Text:
    text: str


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D14")
@pytest.mark.parametrize(
    ("retry", "waits"),
    [
        (Backoff(0.03, 0.1), [0.03, 0.06, 0.1, 0.1]),
        ([0.05, 0.02], [0.05, 0.02, 0.02, 0.02]),
        (0.04, [0.04] * 4),
        (None, [0.025, 0.05, 0.07, 0.07]),
        (0, [0.0] * 4),
    ],
    ids=["Backoff", "list", "number", "settings", "zero"],
)
def test_a_failed_job_waits_as_declared_and_dies_with_its_last_attempt(
    make_queue: MakeQueue, told: Told, retry: Any, waits: list[float]
) -> None:
    # A long poll: that a retry starts in time is not the poll's doing.
    queue = make_queue(retry_base=0.025, retry_max=0.07, poll=20)
    starts: list[float] = []

    @queue.job(max_attempts=5, timeout=5, retry=retry)
    def failing() -> None:
        starts.append(time.monotonic())
        raise ValueError("p4ssw0rd")

    ref = failing.enqueue()
    with in_thread(queue, slots=1):
        found = wait_state(queue, ref.id, "dead")
    assert (found.attempt, found.error_kind, found.error_summary) == (5, "failed", "ValueError")
    ended = told.of(events.JobEnded)
    assert [event.outcome for event in ended] == ["pending"] * 4 + ["dead"]
    assert [event.retry_in for event in ended] == [pytest.approx(wait) for wait in waits] + [None]
    for earlier, later, wait in zip(starts, starts[1:], waits, strict=False):
        assert wait - 0.002 <= later - earlier < wait + 1.0


@pytest.mark.req("D14")
@pytest.mark.req("D10")
def test_handlers_say_how_their_job_goes_on(queue: DBQueue, told: Told) -> None:
    raised: dict[str, BaseException] = {
        "later": RetryLater("rate limit", delay=0.03),
        "whenever": RetryLater(),
        "bury": Bury("no such article"),
        "own": type("Refused", (JobError,), {})("card 1"),
        "foreign": KeyError("4111 1111"),
        "exit": SystemExit(0),
    }

    @queue.job(max_attempts=2, timeout=5, retry=0.01)
    def speaking(say: Text) -> None:
        raise raised[say.text]

    refs = {say: speaking.enqueue(Text(say)).id for say in raised}
    with in_thread(queue, slots=2):
        ends = {say: wait_state(queue, job, "dead") for say, job in refs.items()}
    assert {say: (end.attempt, end.error_kind, end.error_summary) for say, end in ends.items()} == {
        "later": (2, "failed", "RetryLater: rate limit"),
        "whenever": (2, "failed", "RetryLater"),
        "bury": (1, "rejected", "Bury: no such article"),
        "own": (2, "failed", "Refused: card 1"),
        "foreign": (2, "failed", "KeyError"),
        "exit": (2, "failed", "SystemExit"),
    }
    waits = {say: next(e.retry_in for e in told.of(events.JobEnded) if e.id == job) for say, job in refs.items()}
    assert waits == {"later": 0.03, "whenever": 0.01, "bury": None, "own": 0.01, "foreign": 0.01, "exit": 0.01}


# -- jobs that must not run --------------------------------------------------------------------------------------------


@dataclass
class Poison:
    """A job that must not run: how it came to be, and what cures it."""

    id: UUID
    kind: str
    cure: Callable[[], Any] = lambda: None


@pytest.mark.req("D9")
@pytest.mark.req("D18")
def test_poison_is_kept_aside_unexecuted_and_runs_once_cured(make_queue: MakeQueue, database: str) -> None:
    queue, yesterday = make_queue(lease=20), make_queue()
    db, ran = queue.database, []

    @queue.job(max_attempts=1, timeout=5, name="good")
    def good(number: Number) -> None:
        ran.append(number.n)

    @yesterday.job(max_attempts=1, timeout=5, name="gone")
    def gone(number: Number) -> None: ...

    @yesterday.job(max_attempts=1, timeout=5, name="good")
    def changed(text: Text) -> None: ...

    def spoilt(n: int, kind: str, cure: dict[str, Any], **columns: Any) -> Poison:
        job = good.enqueue(Number(n), priority=9).id
        set_columns(db, job.bytes, **columns)
        return Poison(job, kind, lambda: set_columns(db, job.bytes, **cure))

    encode = good.schema.encode
    other = changed.enqueue(Text("x")).id
    poisons = [
        spoilt(1, "corrupt_payload", {"payload": encode(Number(1))}, payload=b"\xff\x00"),
        spoilt(2, "corrupt_payload", {"payload": encode(Number(2))}, payload=b'{"n": "two"}'),
        spoilt(3, "invalid_policy", {"timeout_ms": 1_000}, timeout_ms=3_600_001),
        spoilt(4, "invalid_policy", {"timeout_ms": 1_000}, timeout_ms=0),
        spoilt(5, "invalid_policy", {"timeout_ms": 1_000}, timeout_ms=None),
        Poison(
            other, "schema_mismatch",
            lambda: set_columns(db, other.bytes, payload=encode(Number(7)), fingerprint=good.schema.fingerprint),
        ),
        Poison(gone.enqueue(Number(8)).id, "unknown_target"),
    ]  # fmt: skip
    if database == "sqlite":  # which takes any value in any column, and cannot renew beside a long transaction
        poisons += [
            spoilt(6, "invalid_policy", {"timeout_ms": 1_000}, timeout_ms=20_000),
            spoilt(9, "invalid_policy", {"timeout_ms": 1_000}, timeout_ms=1.5),
            spoilt(10, "corrupt_payload", {"payload": encode(Number(10))}, payload=5),
        ]
    fine = [good.enqueue(Number(100 + n), priority=0).id for n in range(3)]
    with in_thread(queue, slots=2) as running:
        for poison in poisons:
            found = wait_state(queue, poison.id, "blocked")
            assert (found.error_kind, found.attempt) == (poison.kind, 0)
        for job in fine:
            wait_state(queue, job, "succeeded")
        assert sorted(ran) == [100, 101, 102]

        @queue.job(max_attempts=1, timeout=5, name="gone")
        def back(number: Number) -> None:
            ran.append(number.n)

        running.worker.targets = queue.targets  # a new release
        for poison in poisons:
            poison.cure()
            assert queue.retry(poison.id) == "blocked"
            assert wait_state(queue, poison.id, "succeeded").attempt == 1
    assert sorted(ran) == sorted([1, 2, 3, 4, 5, 7, 8, 100, 101, 102] + ([6, 9, 10] if database == "sqlite" else []))


# -- timeouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D14")
def test_a_timeout_sets_the_flag_and_counts_as_a_failure(queue: DBQueue, told: Told) -> None:
    noticed: list[float] = []

    @queue.job(max_attempts=2, timeout=0.3, retry=0.03)
    def slow() -> None:
        job, began = current_job(), time.monotonic()
        assert job is not None
        if job.wait(5):
            noticed.append(time.monotonic() - began)

    ref = slow.enqueue()
    with in_thread(queue, slots=1, lease=4):
        found = wait_state(queue, ref.id, "dead")
    assert (found.attempt, found.error_kind, found.error_summary) == (2, "timeout", None)
    assert [event.retry_in for event in told.of(events.JobEnded)] == [pytest.approx(0.03), None]
    assert [event.timeout for event in told.of(events.JobTimedOut)] == [0.3, 0.3]
    assert len(noticed) == 2
    assert all(0.15 <= seconds < 2.0 for seconds in noticed)
    assert not told.of(events.SlotAbandoned)


@pytest.mark.req("D14")
def test_a_job_that_ignores_its_timeout_loses_its_slot_until_it_returns(queue: DBQueue, told: Told) -> None:
    go = threading.Event()

    @queue.job(max_attempts=1, timeout=0.1)
    def deaf() -> None:
        go.wait(20)

    @queue.job(max_attempts=1, timeout=0.5)
    def other() -> None: ...

    ref = deaf.enqueue()
    with in_thread(queue, slots=4, lease=0.6) as running:
        assert wait_state(queue, ref.id, "dead").error_kind == "timeout"
        assert running.worker.slots.idle == 3
        assert [(e.abandoned, e.limit) for e in told.of(events.SlotAbandoned)] == [(1, 2)]
        wait_state(queue, other.enqueue().id, "succeeded")
        go.set()
        wait_for(lambda: running.worker.slots.idle == 4)
        assert running.alive
    assert record(queue, ref.id).state == "dead", "what it returned in the end does not count"


@pytest.mark.req("D14")
def test_at_half_of_the_slots_the_worker_drains_and_asks_for_a_fresh_process(queue: DBQueue, told: Told) -> None:
    go, good = threading.Event(), threading.Event()

    @queue.job(max_attempts=3, timeout=0.1, retry=30, priority=9)
    def deaf() -> None:
        go.wait(20)

    @queue.job(max_attempts=1, timeout=0.5, priority=9)
    def running_on() -> None:
        good.wait(0.4)

    @queue.job(max_attempts=1, timeout=0.5)
    def waiting() -> None: ...

    stuck = [deaf.enqueue().id for _ in range(2)]
    kept = running_on.enqueue().id
    try:
        with in_thread(queue, slots=4, lease=0.6) as running:
            wait_state(queue, kept, "running")
            told.wait(events.WorkerStopping)
            late = waiting.enqueue().id
            good.set()
            assert running.ended() == EXIT_ABANDONED
    finally:
        go.set()
    for job in stuck:
        found = record(queue, job)
        assert (found.state, found.attempt, found.error_kind) == ("pending", 1, "timeout")
    assert record(queue, kept).state == "succeeded"
    assert record(queue, late).state == "pending"


@pytest.mark.req("D14")
def test_the_time_that_a_claim_takes_is_not_the_jobs(
    queue: DBQueue, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's write lock, or a slow network: the claim's answer comes 0.3 s late, and the job may still run for its
    0.2 s."""
    turn = queue.database.dialect.turn

    def slow(session: Any, asked: Any) -> Any:
        result = turn(session, asked)
        if result.claimed:
            threading.Event().wait(0.3)
        return result

    monkeypatch.setattr(queue.database.dialect, "turn", slow)

    @queue.job(max_attempts=1, timeout=0.2)
    def quick() -> None:
        threading.Event().wait(0.05)

    ref = quick.enqueue()
    drained(queue, slots=1, lease=5)
    assert record(queue, ref.id).state == "succeeded"
    assert not told.of(events.JobTimedOut)
