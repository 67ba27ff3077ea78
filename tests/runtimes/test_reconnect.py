"""A connection or server that goes away in the middle, an answer that is lost, and a statement that the database
refuses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from dbqueue import DBQueue, JobError, current_job, events, ids
from dbqueue.database.tables import Turn, TurnResult
from dbqueue.errors import ConnectionLost, DatabaseError
from dbqueue.states import State
from dbqueue.targets import Target
from tests.factory import make, set_columns
from tests.proxy import Proxy
from tests.runtimes.lab import RunningWorker, Told, in_thread, record, wait_all, wait_state
from tests.servers import Server
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]


@dataclass(frozen=True)
class Number:
    n: int


@dataclass
class Counted:
    """A target whose jobs note that they ran, and wait for ``go`` if their number is 1,000 or more."""

    target: Target[Number]
    ran: list[int]
    go: threading.Event


@pytest.fixture
def go() -> Iterator[threading.Event]:
    go = threading.Event()
    yield go
    go.set()


def declare(queue: DBQueue, go: threading.Event, max_attempts: int = 3, timeout: float = 25) -> Counted:
    ran: list[int] = []

    @queue.job(max_attempts=max_attempts, timeout=timeout, name="job", retry=0.05)
    def job(number: Number) -> None:
        ran.append(number.n)
        if number.n >= 1_000:
            go.wait(20)

    return Counted(job, ran, go)


@contextmanager
def connections(queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When which connection was tried."""
    dialect = queue.database.dialect
    connect = dialect.connect
    tries: list[float] = []

    def counted(*url: Any) -> Any:
        tries.append(time.monotonic())
        return connect(*url)

    with monkeypatch.context() as patched:
        patched.setattr(dialect, "connect", counted)
        yield tries


def database_of(queue: DBQueue) -> str:
    return str(queue.database.url.database)


# -- lost connections --------------------------------------------------------------------------------------------------


@pytest.mark.req("D13")
@pytest.mark.databases("postgres")
def test_running_jobs_outlive_the_loss_of_all_connections(
    queue: DBQueue, told: Told, postgres: Server, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = declare(queue, go)
    with in_thread(queue, slots=3) as running:
        refs = [job.target.enqueue(Number(1_000 + n)).id for n in range(2)]
        told.wait(events.JobStarted, 2)
        running.asleep()
        for n in range(1, 4):
            with connections(queue, monkeypatch) as tries:
                postgres.terminate_connections(database_of(queue))
                told.wait(events.DatabaseBack, n)
                running.asleep()
                assert len(tries) <= 6
        go.set()
        for ref in refs:
            assert wait_state(queue, ref, "succeeded").attempt == 1
        last = job.target.enqueue(Number(0)).id
        wait_state(queue, last, "succeeded")
    assert sorted(job.ran) == [0, 1_000, 1_001]
    assert len(told.of(events.DatabaseTrouble)) == len(told.of(events.DatabaseBack)) == 3
    assert not told.of(events.ClaimLost)


@pytest.mark.req("D13")
@pytest.mark.databases("postgres")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_running_jobs_outlive_a_restart_of_the_server(
    queue: DBQueue, told: Told, postgres: Server, go: threading.Event, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """One finishes before, one while the server is away, one afterwards; the tries are few, and told once."""
    job = declare(queue, go)
    with in_thread(queue, slots=2) as running:
        wait_state(queue, job.target.enqueue(Number(0)).id, "succeeded")
        during = job.target.enqueue(Number(1_000)).id
        told.wait(events.JobStarted, 2)
        with connections(queue, monkeypatch) as tries:
            postgres.stop(mode)
            told.wait(events.DatabaseTrouble)
            go.set()
            wait_for(lambda: running.worker.slots.idle == 2)
            threading.Event().wait(0.7)
            assert 2 <= len(tries) <= 8, "no busy loop, and no giving up"
            postgres.start()
            assert wait_state(queue, during, "succeeded").attempt == 1
        wait_state(queue, job.target.enqueue(Number(1)).id, "succeeded")
    assert job.ran == [0, 1_000, 1]
    assert (len(told.of(events.DatabaseTrouble)), len(told.of(events.DatabaseBack))) == (1, 1)


@pytest.mark.req("D13")
@pytest.mark.parametrize("good", [False, True], ids=["every turn fails", "the reconnect succeeds"])
def test_a_database_that_takes_connections_and_fails_every_turn_is_not_besieged(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    """A standby after a failover: it lets everybody in, and refuses to write."""
    job = declare(queue, go)
    dialect = queue.database.dialect

    def refuse(*_: Any) -> Any:
        raise ConnectionLost("read only")

    with in_thread(queue, slots=1) as running, connections(queue, monkeypatch) as tries:
        running.asleep()
        monkeypatch.setattr(dialect, "turn", refuse)
        monkeypatch.setattr(dialect, "probe", refuse)
        if not good:
            monkeypatch.setattr(dialect, "release_unknown", refuse)
        began = time.monotonic()
        running.worker._look_for_jobs()
        running.worker.wake.ring()
        told.wait(events.DatabaseTrouble)
        threading.Event().wait(0.8)
        limit = 2 if dialect.listens else 1
        assert 2 <= len(tries) <= 8 * limit, (time.monotonic() - began, tries)
        assert len(told.of(events.DatabaseTrouble)) == 1
        monkeypatch.undo()
        wait_state(queue, job.target.enqueue(Number(0)).id, "succeeded")
    assert len(told.of(events.DatabaseTrouble)) == len(told.of(events.DatabaseBack))


@pytest.mark.req("D13")
def test_a_handler_is_told_when_its_lease_must_have_ended_while_the_database_was_away(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may run the job by now. If the claim turns out to be ours after all, the job is handed back, not
    done by half."""
    started, stopped = threading.Event(), threading.Event()

    @queue.job(max_attempts=2, timeout=0.9, name="job")
    def job() -> None:
        running = current_job()
        assert running is not None
        if running.attempt > 1 or stopped.is_set():
            return
        started.set()
        if running.wait(10):
            stopped.set()

    def away(*_: Any) -> Any:
        raise ConnectionLost("away")

    ref = job.enqueue()
    with in_thread(queue, slots=1, lease=1.0) as running:
        assert started.wait(5)
        for claim in running.worker.claims._running.values():
            claim.deadline += 60  # the lease is to end before the timeout, which D18 forbids on SQLite
        with monkeypatch.context() as patched:
            patched.setattr(queue.database, "open_session", away)
            patched.setattr(queue.database.dialect, "turn", away)
            assert stopped.wait(5)
            set_columns(queue.database, ref.id.bytes, lease_until=2**51)  # the database's clock was set back
        found = wait_state(queue, ref.id, "succeeded")
    assert found.attempt == 1, "handed back with its attempt, then done"
    assert [event.kind for event in told.of(events.JobEnded)] == ["released", None]


# -- lost answers ------------------------------------------------------------------------------------------------------


def _lose(
    queue: DBQueue, monkeypatch: pytest.MonkeyPatch, which: Callable[[Turn, TurnResult], bool]
) -> list[TurnResult]:
    """The next turn that ``which`` describes is done by the database, and its answer is lost with the connection."""
    dialect = queue.database.dialect
    lost: list[TurnResult] = []
    turn = dialect.turn

    def losing(session: Any, asked: Turn) -> TurnResult:
        result = turn(session, asked)
        if not lost and which(asked, result):
            lost.append(result)
            raise ConnectionLost("cut")
        return result

    monkeypatch.setattr(dialect, "turn", losing)
    return lost


@pytest.mark.req("D12", "D13")
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_claim_whose_answer_was_lost_is_handed_back_and_costs_nothing(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch, max_attempts: int
) -> None:
    job = declare(queue, go, max_attempts=max_attempts)
    with in_thread(queue, slots=2) as running:
        busy = job.target.enqueue(Number(1_000)).id
        told.wait(events.JobStarted)
        running.asleep()  # no turn is under way while it is replaced
        lost = _lose(queue, monkeypatch, lambda turn, result: bool(result.claimed))
        ref = job.target.enqueue(Number(1)).id
        assert wait_state(queue, ref, "succeeded").attempt == 1
        assert lost[0].claimed[0].attempt == 1
        assert record(queue, busy).state == "running", "what the worker knows it keeps"
        assert running.alive
        go.set()
        assert wait_state(queue, busy, "succeeded").attempt == 1
    assert sorted(job.ran) == [1, 1_000]
    assert [event.released for event in told.of(events.DatabaseBack)] == [1]


@pytest.mark.req("D13")
def test_an_outcome_whose_answer_was_lost_is_not_written_twice(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = declare(queue, go)
    with in_thread(queue, slots=2):
        lost = _lose(queue, monkeypatch, lambda turn, result: bool(turn.settlements))
        refs = [job.target.enqueue(Number(n)).id for n in range(4)]
        for ref in refs:
            wait_state(queue, ref, "succeeded")
        wait_for(lambda: len(told.of(events.JobEnded)) == 4)
    assert lost
    assert sorted(job.ran) == [0, 1, 2, 3]
    assert not told.of(events.ClaimLost), "the database says that it is done already"
    with queue.database.session() as session:
        finished = queue.database.dialect.names.qualified("finished")
        assert session.execute(f"SELECT count(*) FROM {finished}")[0][0] == 4


@pytest.mark.req("D13")
def test_a_retry_whose_answer_was_lost_counts_once(queue: DBQueue, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    @queue.job(max_attempts=3, timeout=5, retry=0.05)
    def failing() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError

    with in_thread(queue, slots=1):
        lost = _lose(queue, monkeypatch, lambda turn, _: any(s.state is State.PENDING for s in turn.settlements))
        ref = failing.enqueue()
        assert wait_state(queue, ref.id, "succeeded").attempt == 3
    assert lost
    assert len(attempts) == 3


@pytest.mark.req("D12", "D13")
def test_a_second_claim_of_a_job_whose_answers_were_lost(
    queue: DBQueue, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[float] = []
    dialect = queue.database.dialect
    turn, lost = dialect.turn, []

    @queue.job(max_attempts=3, timeout=5, retry=0.01, name="job")
    def job() -> None:
        runs.append(time.monotonic())
        if len(runs) == 1:
            raise ValueError

    def losing(session: Any, asked: Turn) -> TurnResult:
        result = turn(session, asked)
        failed = any(s.state is State.PENDING for s in asked.settlements)
        again = any(row.attempt == 2 for row in result.claimed)
        if (failed and not lost) or (again and len(lost) == 1):
            lost.append(asked)
            raise ConnectionLost("cut")
        return result

    # The retry is promoted by somebody else while this worker is away.
    monkeypatch.setattr(dialect, "turn", losing)
    monkeypatch.setattr(
        "dbqueue.runtime.connection.SECOND_RELEASE", 60.0
    )  # handed back at the reconnect, not at the second look
    with in_thread(queue, slots=1):
        ref = job.enqueue()
        told.wait(events.DatabaseTrouble)
        other = queue.database.open_session()
        until = time.monotonic() + 5
        while not dialect.upkeep(other, 10, ("default",)).promoted and time.monotonic() < until:
            time.sleep(0.002)
        other.close()
        found = wait_state(queue, ref.id, "succeeded")
    assert len(lost) == 2
    assert (found.attempt, found.lapses) == (2, 0)
    assert runs[1] - runs[0] < 30


@pytest.mark.req("D13")
@pytest.mark.databases("postgres")
def test_answers_lost_on_the_wire(database_url: str, make_queue: MakeQueue, told: Told, go: threading.Event) -> None:
    """A proxy keeps the server's answer to a turn, or the turn itself, ten times in a row, at whatever it happens to
    contain."""
    make_queue()
    proxy = Proxy(database_url)
    assert urlsplit(proxy.url).port != urlsplit(database_url).port
    queue = DBQueue(proxy.url, listen_url=database_url)
    watching = make_queue()
    job = declare(queue, go)
    try:
        with in_thread(queue, slots=3) as running:
            running.asleep()  # its start is not what is tested here
            for n in range(10):
                before = proxy.losses
                (proxy.lose_request if n % 3 == 2 else proxy.lose_answer)(b"dbqueue_")
                direct = declare(make_queue(), go).target
                direct.enqueue_many([Number(10 * n + m) for m in range(5)])
                wait_for(lambda: proxy.losses > before)  # noqa: B023
                wait_all(watching, lambda counts: counts == {"succeeded": 5 * (n + 1)})  # noqa: B023
                # The answer to a mere look may have been the last one lost.
                wait_for(lambda: len(told.of(events.DatabaseTrouble)) == len(told.of(events.DatabaseBack)))
    finally:
        queue.close()
        proxy.close()
    assert proxy.losses == 10
    assert sorted(job.ran) == [10 * n + m for n in range(10) for m in range(5)], "none lost, none doubled"
    assert all(found.attempt == 1 and found.lapses == 0 for found in watching.jobs(state="succeeded"))
    assert len(told.of(events.DatabaseTrouble)) == len(told.of(events.DatabaseBack)) <= 10


@pytest.mark.req("D12")
def test_a_turn_that_the_server_finishes_after_the_reconnect_is_found_too(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was cut and the server did not notice: it claims for a worker that is connected again."""
    monkeypatch.setattr("dbqueue.runtime.connection.SECOND_RELEASE", 0.3)
    job = declare(queue, go)
    with in_thread(queue, slots=1) as running:
        running.asleep()
        running.cut()
        told.wait(events.DatabaseBack)
        late = make(
            queue.database, State.RUNNING, target="job", fingerprint=job.target.schema.fingerprint, timeout_ms=5_000,
            payload=job.target.schema.encode(Number(7)), worker=running.worker.name,
        )  # fmt: skip
        found = wait_state(queue, ids.as_uuid(late.id), "succeeded")
    assert (found.attempt, found.lapses, job.ran) == (1, 0, [7])


# -- refusals ----------------------------------------------------------------------------------------------------------


def _together(queue: DBQueue, go: threading.Event) -> Target[Number]:
    """Jobs that end when they may; number 0 fails."""

    @queue.job(max_attempts=2, timeout=10, name="job", retry=60)
    def job(number: Number) -> None:
        assert go.wait(8)
        if number.n == 0:
            raise JobError("bad")

    return job


def _one_batch(running: RunningWorker, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The worker sees no outcome before there are ``count``."""
    slots: Any = running.worker.slots
    collect = slots.collect
    monkeypatch.setattr(slots, "collect", lambda: collect() if len(slots._done) >= count else [])


@pytest.mark.req("D13", "D9")
@pytest.mark.parametrize("bad", ["summary", "value", "refused"])
def test_one_outcome_that_cannot_be_written_does_not_stop_the_others(
    make_queue: MakeQueue, told: Told, database: str, go: threading.Event, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    queue = make_queue(lease=11)
    slots, dialect = 5, queue.database.dialect
    turn = dialect.turn
    if bad == "summary":
        # No text of ours contains a NUL, and SQLite would take it.
        monkeypatch.setattr("dbqueue.runtime.execute.summary_of", lambda error: "bad\0")

    def refusing(session: Any, asked: Turn) -> TurnResult:
        if bad == "summary" and database == "sqlite" and any("\0" in (s.summary or "") for s in asked.settlements):
            raise DatabaseError("refused")
        if bad == "refused" and any(s.kind for s in asked.settlements):
            raise DatabaseError("refused")
        if bad == "value":  # which no driver can send: an error that is not the database's
            asked = replace(asked, settlements=[replace(s, delay=2**80) if s.kind else s for s in asked.settlements])
        return turn(session, asked)

    job = _together(queue, go)
    with in_thread(queue, slots=slots) as running:
        refs = [job.enqueue(Number(n)).id for n in range(slots)]
        told.wait(events.JobStarted, slots)
        monkeypatch.setattr(dialect, "turn", refusing)
        _one_batch(running, monkeypatch, slots)
        go.set()
        for ref in refs[1:]:
            wait_state(queue, ref, "succeeded")
        told.wait(events.DatabaseBack)
        found = record(queue, refs[0])
        if bad == "summary":  # written without it
            assert (found.state, found.attempt, found.error_kind, found.error_summary) == ("pending", 1, "failed", None)
        else:  # left to its lease, and not taken for an unknown claim after a reconnect, which would cost no attempt
            assert (found.state, found.attempt) == ("running", 1)
            assert len(told.of(events.ClaimLost)) == 1
            running.cut()
            told.wait(events.DatabaseBack, 2)
            assert record(queue, refs[0]).state == "running"
        assert running.alive
    assert len(told.of(events.DatabaseTrouble)) == len(told.of(events.DatabaseBack))


@pytest.mark.req("D13", "D14")
def test_a_claim_that_is_refused_stops_neither_outcomes_nor_renewals(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if the reason is a defect of our own; and the worker asks again, a second apart, until it goes well."""
    job = declare(queue, go, timeout=0.9)
    dialect = queue.database.dialect
    turn, claims, renewals = dialect.turn, [], []

    def refusing(session: Any, asked: Turn) -> TurnResult:
        renewals.extend(asked.renewals)
        if asked.claim is not None:
            claims.append(time.monotonic())
            raise ZeroDivisionError
        return turn(session, asked)

    with in_thread(queue, slots=3, lease=1.0) as running:
        first = job.target.enqueue(Number(1_000)).id
        told.wait(events.JobStarted)
        running.asleep()
        with monkeypatch.context() as patched, caplog.at_level(logging.CRITICAL, "dbqueue"):
            patched.setattr(dialect, "turn", refusing)
            second = job.target.enqueue(Number(0)).id
            told.wait(events.DatabaseTrouble)
            threading.Event().wait(0.5)
            assert renewals
            go.set()
            wait_state(queue, first, "succeeded")
            assert running.alive
            assert 1 <= len(claims) <= 4
        assert wait_state(queue, second, "succeeded").attempt == 1
    assert (len(told.of(events.DatabaseTrouble)), len(told.of(events.DatabaseBack))) == (1, 1)


@pytest.mark.req("D14")
def test_upkeep_that_is_refused_stops_nothing_else(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = declare(queue, go)
    tries: list[float] = []

    def refuse(*_: Any, **__: Any) -> Any:
        tries.append(time.monotonic())
        raise DatabaseError("refused")

    with in_thread(queue, slots=1) as running:
        running.asleep()
        monkeypatch.setattr(queue.database.dialect, "upkeep", refuse)
        told.wait(events.DatabaseTrouble)
        began = time.monotonic()
        for n in range(10):
            wait_state(queue, job.target.enqueue(Number(n)).id, "succeeded")
        assert time.monotonic() - began < 3, "claims do not wait for it"
        assert running.alive
        before = len(tries)
        threading.Event().wait(0.6)
        assert len(tries) - before <= 4
        monkeypatch.undo()
        told.wait(events.DatabaseBack)
    assert len(told.of(events.DatabaseTrouble)) == 1


@pytest.mark.req("D13")
def test_a_row_that_is_locked_for_long_is_asked_for_again_without_spinning(
    queue: DBQueue, told: Told, go: threading.Event, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    """An operator's transaction holds the row of a finished job: busy is no loss, and no reason to hurry."""
    if database == "sqlite":
        pytest.skip("rows have no locks of their own there")
    job = declare(queue, go)
    dialect = queue.database.dialect
    turn, settles = dialect.turn, []

    def counted(session: Any, asked: Turn) -> TurnResult:
        settles.extend(asked.settlements)
        return turn(session, asked)

    with in_thread(queue, slots=2):
        ref = job.target.enqueue(Number(1_000)).id
        told.wait(events.JobStarted)
        with queue.database.transaction() as holder:
            holder.execute(f"SELECT 1 FROM {dialect.names.qualified('jobs')} FOR UPDATE")
            monkeypatch.setattr(dialect, "turn", counted)
            go.set()
            wait_for(lambda: settles)
            threading.Event().wait(0.7)
            assert 3 <= len(settles) <= 25
            other = job.target.enqueue(Number(1)).id
            wait_state(queue, other, "succeeded")
        assert wait_state(queue, ref, "succeeded").attempt == 1
    assert not told.of(events.ClaimLost)
