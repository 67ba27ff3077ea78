"""Outboxes that a worker delivers: `dbqueue worker --outbox name=module:callable` (A6)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dbqueue import Bury, ConfigError, DBQueue, LostClaim, OutboxMessage
from dbqueue.runtime.deliver import Delivery
from dbqueue.runtime.worker import Worker, WorkerOptions
from tests.factory import set_columns
from tests.runtimes.jobs import Jobs, Nap, notes, open_gate
from tests.runtimes.lab import Process, drained, in_thread, record, wait_state
from tests.waiting import wait_for

pytestmark = pytest.mark.req("A6")

RECEIPTS = "--outbox=receipts=tests.runtimes.outboxes:deliver"
POOLS = ("threads", "processes")


def delivery(deliver: Callable[[OutboxMessage], object], outbox: str = "receipts") -> Delivery:
    return Delivery(outbox, deliver, deliver.__module__, deliver.__qualname__)


def noted(folder: Path, what: str, count: int = 1) -> None:
    wait_for(lambda: len(notes(folder, what)) >= count, 30, f"not {count} times {what}")


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_a_message_whose_worker_was_killed_is_delivered_again(
    queue: DBQueue, start: Callable[..., Process], database_url: str, tmp_path: Path, pool: str
) -> None:
    """The worker needs no application: the outbox and a URL are enough."""
    outbox = queue.outbox("receipts")
    worker = start(RECEIPTS, "--url", database_url, "-P", pool, "-c", 1, app=None).started()
    ref = outbox.enqueue({"wait": "for ever"})
    noted(tmp_path, "deliver")
    worker.kill()
    seen: list[int] = []
    assert not outbox.run_once("w", lambda message: seen.append(message.attempt)), "its lease lasts"
    queue.database.clock.advance(76)
    assert outbox.run_once("w", lambda message: seen.append(message.attempt))
    assert seen == [2]
    assert (record(queue, ref.id).state, record(queue, ref.id).lapses) == ("acked", 1)
    assert notes(tmp_path, "delivered") == []


def test_beside_the_jobs_of_an_application(jobs: Jobs, start: Callable[..., Process], tmp_path: Path) -> None:
    """With -A, -Q and -c; a stop lets a delivery end."""
    outbox, other = jobs.queue.outbox("receipts"), jobs.queue.outbox("letters")
    more = ("--outbox", "letters=tests.runtimes.outboxes:deliver_async", "--lease", 75)
    worker = start(RECEIPTS, *more, "-Q", "default", "-c", 2).started()
    job, letter = jobs.quick.enqueue(Nap()).id, other.enqueue("b").id
    elsewhere = jobs.queue.send("elsewhere", 1).id
    wait_state(jobs.queue, job, "succeeded")
    wait_state(jobs.queue, letter, "acked")
    held = outbox.enqueue({"wait": "gate"}).id
    noted(tmp_path, "deliver")
    worker.signal(signal.SIGTERM)
    wait_for(lambda: " stops (" in worker.log)
    assert record(jobs.queue, held).state == "running"
    open_gate(tmp_path, "gate")
    assert worker.ended() == 0
    assert (record(jobs.queue, held).state, record(jobs.queue, held).attempt) == ("acked", 1)
    assert record(jobs.queue, elsewhere).state == "pending"


@pytest.mark.parametrize("pool", POOLS)
def test_a_heartbeat_gives_a_delivery_its_time_anew(
    queue: DBQueue, start: Callable[..., Process], database_url: str, tmp_path: Path, pool: str
) -> None:
    """Their rows say 0.3 s in the place of a minute, and they take half a second."""
    refs = {payload: queue.outbox("receipts").enqueue(payload).id for payload in ("beats", "none")}
    for ref in refs.values():
        set_columns(queue.database, ref.bytes, timeout_ms=300)
    start("--outbox", "receipts=tests.runtimes.outboxes:beat", "--url", database_url, "-P", pool, "-c", 2, app=None)
    assert wait_state(queue, refs["beats"], "acked", deadline=30).attempt == 1
    late = wait_for(lambda: [seen for seen in [record(queue, refs["none"])] if seen.error_kind], 30)[0]
    assert (late.state, late.error_kind, late.attempt) == ("pending", "timeout", 1)


# -- in this process ---------------------------------------------------------------------------------------------------


def test_a_delivery_that_fails_is_tried_five_times_five_seconds_apart(queue: DBQueue) -> None:
    ref, seen = queue.outbox("receipts").enqueue({"n": 1}), list[tuple[object, object, int, int]]()

    def refuse(message: OutboxMessage) -> None:
        seen.append((message.id, message.payload, message.attempt, message.max_attempts))
        raise ValueError("a secret")

    for attempt in range(1, 6):
        assert drained(queue, outboxes=(delivery(refuse),)) == 0
        assert seen == [(ref.id, {"n": 1}, number, 5) for number in range(1, attempt + 1)]
        found = record(queue, ref.id)
        assert (found.error_kind, found.error_summary) == ("failed", "ValueError")
        if attempt < 5:
            assert found.state == "pending"
            assert 4.9 < (found.run_at - found.updated_at).total_seconds() <= 5.0
            queue.database.clock.advance(4.5)
            drained(queue, outboxes=(delivery(refuse),))
            assert len(seen) == attempt, "not before its five seconds"
            queue.database.clock.advance(0.6)
    assert found.state == "dead"


def test_how_deliveries_end(queue: DBQueue) -> None:
    def bury(_: OutboxMessage) -> None:
        raise Bury("no such address")

    async def deliver(message: OutboxMessage) -> None:
        message.heartbeat()

    first, second = queue.outbox("receipts").enqueue(1).id, queue.outbox("letters").enqueue(2).id
    assert drained(queue, outboxes=(delivery(bury), delivery(deliver, "letters"))) == 0
    assert (record(queue, first).state, record(queue, first).error_summary) == ("dead", "Bury: no such address")
    assert record(queue, second).state == "acked"


def test_a_delivery_that_must_end_is_told_by_its_heartbeat(queue: DBQueue) -> None:
    """It is handed back, the attempt uncounted, when the worker must end at once."""
    ref, told = queue.outbox("receipts").enqueue(1), list[str]()

    def deliver(message: OutboxMessage) -> None:
        told.append("begins")
        try:
            wait_for(lambda: message.heartbeat() or False, 20)
        except LostClaim:
            told.append("is told")
            raise

    with in_thread(queue, slots=1, outboxes=(delivery(deliver),)) as running:
        wait_for(lambda: told == ["begins"])
        running.stop()
        running.stop()
        running.ended()
    assert told == ["begins", "is told"]
    found = record(queue, ref.id)
    assert (found.state, found.error_kind, found.attempt) == ("pending", "released", 0)


def test_only_what_is_named_is_claimed(queue: DBQueue) -> None:
    other, job = queue.outbox("letters").enqueue(1).id, queue.send("default", 1).id
    assert drained(queue, outboxes=(delivery(lambda _: None),)) == 0
    assert (record(queue, other).state, record(queue, job).state) == ("pending", "pending")


def test_the_lease_that_a_delivery_needs(queue: DBQueue, database: str) -> None:
    """On SQLite it must exceed the minute of a delivery (D18), so there the usual one, which does not, is longer."""
    outboxes = (delivery(lambda _: None),)

    def lease(**options: float) -> float:
        worker = Worker(queue, WorkerOptions(outboxes=outboxes, **options))  # type: ignore[arg-type]
        worker._close()
        return worker.lease / 1e6

    assert lease() == (75 if database == "sqlite" else 60)
    assert lease(lease=90) == 90
    if database == "sqlite":
        with pytest.raises(ConfigError, match=r"dbqueue\.outbox\.receipts"):
            lease(lease=60)
    else:
        assert lease(lease=30) == 30


def test_one_outbox_has_one_delivery(queue: DBQueue) -> None:
    with pytest.raises(ConfigError, match="twice"):
        Worker(queue, WorkerOptions(outboxes=(delivery(lambda _: None), delivery(lambda _: None))))
