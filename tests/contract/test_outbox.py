"""The outbox: written with the caller's data, delivered after the commit, at least once, on its own curve (A6)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest

import dbqueue
from dbqueue import (
    Bury,
    DBQueue,
    InvalidArgument,
    InvalidName,
    InvalidTarget,
    JobError,
    LostClaim,
    Outbox,
    OutboxMessage,
    ReservedName,
    RetryLater,
)
from dbqueue.views import JobRecord

pytestmark = pytest.mark.req("A6")


@pytest.fixture
def queue(database_url: str) -> Iterator[DBQueue]:
    queue = DBQueue(database_url)
    queue.migrate()
    yield queue
    queue.close()


@pytest.fixture
def outbox(queue: DBQueue) -> Outbox:
    return queue.outbox("receipts")


def record(queue: DBQueue, job_id: UUID) -> JobRecord:
    found = queue.get_job(job_id)
    assert found is not None
    return found


def raising(error: BaseException) -> Callable[[OutboxMessage], None]:
    def deliver(_: OutboxMessage) -> None:
        raise error

    return deliver


@contextmanager
def transaction(queue: DBQueue) -> Iterator[Any]:
    """A caller's connection, on which nothing is committed yet."""
    if queue.database.dialect.name == "sqlite":
        connection: Any = sqlite3.connect(str(queue.database.url.database), isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
    else:
        connection = psycopg.connect(queue.database.url.render_as_string(hide_password=False))
    with closing(connection):
        yield connection


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [False, True])
def test_what_is_written_is_stamped_alike_in_both_ways(queue: DBQueue, outbox: Outbox, joined: bool) -> None:
    if joined:
        with transaction(queue) as connection:
            with dbqueue.using(connection):
                ref = outbox.enqueue({"order": 7}, key="k")
            assert queue.get_job(ref.id) is None, "not before the caller's commit"
            connection.commit()
    else:
        ref = outbox.enqueue({"order": 7}, key="k")
    found = record(queue, ref.id)
    assert (found.state, found.queue, found.key) == ("pending", "dbqueue.outbox.receipts", "k")
    assert (found.timeout, found.max_attempts, found.on_crash) == (60.0, 5, "retry")
    assert outbox.enqueue({"order": 7}, key="k").duplicate


def test_a_rollback_leaves_nothing(queue: DBQueue, outbox: Outbox) -> None:
    with transaction(queue) as connection:
        with dbqueue.using(connection):
            outbox.enqueue("never")
        connection.rollback()
    assert not outbox.run_once("w", raising(AssertionError("delivered")))
    assert queue.counts() == {}


def test_any_json_value_arrives_as_it_was(outbox: Outbox) -> None:
    values: list[Any] = [None, True, 7, 1.5, "ü", [1, [2]], {"a": {"b": None}}]
    for value in values:
        outbox.enqueue(value)
    got: list[Any] = []
    while outbox.run_once("w", lambda message: got.append(message.payload)):
        pass
    assert got == values


def test_a_message_waits_for_its_time(queue: DBQueue, outbox: Outbox) -> None:
    outbox.enqueue(1, delay=60)
    outbox.enqueue(2, run_at=record(queue, outbox.enqueue(0, delay=120).id).run_at)
    got: list[Any] = []
    assert not outbox.run_once("w", lambda message: got.append(message.payload))
    queue.database.clock.advance(61)
    while outbox.run_once("w", lambda message: got.append(message.payload)):
        pass
    queue.database.clock.advance(61)
    while outbox.run_once("w", lambda message: got.append(message.payload)):
        pass
    assert got[0] == 1
    assert sorted(got) == [0, 1, 2]


def test_outboxes_are_apart(queue: DBQueue, outbox: Outbox) -> None:
    outbox.enqueue(1, key="k")
    assert not queue.outbox("other").run_once("w", raising(AssertionError()))
    assert not queue.outbox("other").enqueue(1, key="k").duplicate


def test_bad_input_is_refused_before_anything_is_written(queue: DBQueue, outbox: Outbox) -> None:
    with pytest.raises(ReservedName):
        queue.outbox("dbqueue.x")
    for name in ("", " x", "x" * 186, 7):
        with pytest.raises(InvalidName, match="outbox name"):
            queue.outbox(name)  # type: ignore[arg-type]
    assert len(queue.outbox("x" * 185).queue_name) == 200
    with pytest.raises(InvalidArgument, match="no JSON value"):
        outbox.enqueue(object())
    with pytest.raises(InvalidArgument, match="1048576"):
        outbox.enqueue("x" * 1_048_576)
    with pytest.raises(InvalidArgument, match="delay"):
        outbox.enqueue(1, delay=-1)
    with pytest.raises(InvalidArgument, match="key"):
        outbox.enqueue(1, key="")
    with pytest.raises(InvalidArgument, match="has no option 'lease'"):
        outbox.enqueue(1, lease=7)  # type: ignore[call-arg]
    assert queue.counts() == {}
    outbox.enqueue(1)

    async def deliver(_: OutboxMessage) -> None: ...

    with pytest.raises(InvalidArgument, match="coroutine function"):
        outbox.run_once("w", deliver)
    with pytest.raises(InvalidArgument, match="plain callable"):
        outbox.run_once("w", None)  # type: ignore[arg-type]
    with pytest.raises(InvalidName, match="worker name"):
        outbox.run_once("", raising(AssertionError()))
    assert queue.counts() == {"pending": 1}, "nor claimed"


def test_no_other_door_leads_to_its_queue(queue: DBQueue, outbox: Outbox) -> None:
    """The broker's are tested with the transport, the command line's with the worker."""
    name = outbox.queue_name
    with pytest.raises(ReservedName):
        queue.send(name, 1)
    with pytest.raises(ReservedName):
        queue.claim(name, "w")
    with pytest.raises(ReservedName):
        queue.job(max_attempts=1, timeout=1, queue=name)(_nothing)
    with pytest.raises((ReservedName, InvalidTarget)):
        queue.job(max_attempts=1, timeout=1, name=name)(_nothing)
    assert queue.counts() == {}


def _nothing() -> None: ...


# -- delivering --------------------------------------------------------------------------------------------------------


def test_what_deliver_returns_from_is_acked(queue: DBQueue, outbox: Outbox) -> None:
    ref, seen = outbox.enqueue({"n": 1}), list[OutboxMessage]()
    assert outbox.run_once("w", seen.append)
    assert (seen[0].id, seen[0].payload, seen[0].attempt, seen[0].max_attempts) == (ref.id, {"n": 1}, 1, 5)
    assert record(queue, ref.id).state == "acked"
    assert not outbox.run_once("w", seen.append)
    assert len(seen) == 1


def test_what_raises_is_tried_five_times_five_seconds_apart(queue: DBQueue, outbox: Outbox) -> None:
    ref = outbox.enqueue(1)
    for attempt in range(1, 6):
        seen: list[int] = []

        def deliver(message: OutboxMessage, seen: list[int] = seen) -> None:
            seen.append(message.attempt)
            raise ValueError("a secret")

        assert outbox.run_once("w", deliver)
        assert seen == [attempt]
        found = record(queue, ref.id)
        assert (found.error_kind, found.error_summary) == ("failed", "ValueError")
        assert found.state == ("pending" if attempt < 5 else "dead")
        queue.database.clock.advance(3)
        assert not outbox.run_once("w", deliver), "not before its five seconds"
        queue.database.clock.advance(2.1)
    assert not outbox.run_once("w", raising(AssertionError("a sixth time")))


def test_deliver_may_say_how_it_goes_on(queue: DBQueue, outbox: Outbox) -> None:
    ref = outbox.enqueue(1)
    assert outbox.run_once("w", raising(RetryLater("the receiver is down", delay=60)))
    queue.database.clock.advance(59)
    assert not outbox.run_once("w", _ignored)
    queue.database.clock.advance(1.1)
    assert outbox.run_once("w", raising(RetryLater(delay=float("nan"))))
    queue.database.clock.advance(5.1)
    assert outbox.run_once("w", raising(JobError("told on purpose")))
    assert record(queue, ref.id).error_summary == "JobError: told on purpose"
    queue.database.clock.advance(5.1)
    assert outbox.run_once("w", raising(Bury("no such address")))
    found = record(queue, ref.id)
    assert (found.state, found.attempt, found.error_kind, found.error_summary) == (
        "dead", 4, "rejected", "Bury: no such address",
    )  # fmt: skip


def _ignored(_: OutboxMessage) -> None: ...


def test_a_delivery_without_a_heartbeat_is_lost_after_sixty_seconds(queue: DBQueue, outbox: Outbox) -> None:
    ref, seen = outbox.enqueue(1), list[int]()

    def slow(message: OutboxMessage) -> None:
        queue.database.clock.advance(61)
        assert outbox.run_once("w2", lambda message: seen.append(message.attempt)), "somebody else takes it over"

    with pytest.raises(LostClaim, match="not recorded"):
        outbox.run_once("w", slow)
    assert seen == [2]
    assert (record(queue, ref.id).state, record(queue, ref.id).attempt) == ("acked", 2)


def test_a_heartbeat_gives_sixty_seconds_more(queue: DBQueue, outbox: Outbox) -> None:
    ref = outbox.enqueue(1)

    def slow(message: OutboxMessage) -> None:
        for _ in range(4):
            queue.database.clock.advance(50)
            message.heartbeat()
            assert not outbox.run_once("w2", _ignored)

    assert outbox.run_once("w", slow)
    assert (record(queue, ref.id).state, record(queue, ref.id).attempt) == ("acked", 1)


def test_a_heartbeat_that_comes_too_late_ends_the_delivery(queue: DBQueue, outbox: Outbox) -> None:
    ref = outbox.enqueue(1)

    def slow(message: OutboxMessage) -> None:
        queue.database.clock.advance(61)
        message.heartbeat()
        pytest.fail("it went on")

    with pytest.raises(LostClaim):
        outbox.run_once("w", slow)
    assert outbox.run_once("w", _ignored)
    assert record(queue, ref.id).attempt == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interruption_hands_the_message_back(queue: DBQueue, outbox: Outbox, error: type[BaseException]) -> None:
    ref = outbox.enqueue(1)
    with pytest.raises(error):
        outbox.run_once("w", raising(error()))
    assert record(queue, ref.id).state == "pending"
    assert outbox.run_once("w", _ignored)
    assert record(queue, ref.id).attempt == 1, "the attempt was not counted"


def test_a_coroutine_in_disguise_delivers_nothing_and_is_told(queue: DBQueue, outbox: Outbox) -> None:
    async def deliver(_: OutboxMessage) -> None: ...

    ref = outbox.enqueue(1)
    assert outbox.run_once("w", lambda message: deliver(message))
    assert (record(queue, ref.id).state, record(queue, ref.id).error_summary) == ("pending", "TypeError")


def test_a_payload_that_cannot_be_read_is_dead_at_once(queue: DBQueue, outbox: Outbox) -> None:
    ref = outbox.enqueue(1)
    with queue.database.session() as session:
        broken = "x'7b'" if queue.database.dialect.name == "sqlite" else "'\\x7b'"
        session.execute(f"UPDATE dbqueue_jobs SET payload = {broken}")
    assert outbox.run_once("w", raising(AssertionError("delivered")))
    found = record(queue, ref.id)
    assert (found.state, found.error_summary) == ("dead", "CorruptPayload")
