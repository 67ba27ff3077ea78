"""Workers that end at the wrong moment, and tasks that will not end: nothing is done twice without need, and nobody else waits (C4)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import kombu
import pytest

from dbqueue import DBQueue
from dbqueue.clock import SECOND
from dbqueue.kombu_transport.ledger import LONGEST_WAIT, REQUEUES_AT_ONCE
from dbqueue.kombu_transport.station import MOST_LAPSES
from tests.factory import set_columns
from tests.transport.shops import Shop
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C4"), pytest.mark.timeout(180)]

MakeShop = Callable[..., Shop]
Connect = Callable[..., kombu.Connection]

WAITS = "state = 0 AND ready_at IS NULL AND run_at > updated_at"
STUBBORN = """
import signal
from celery.exceptions import Reject

@app.task(shared=False, bind=True, acks_late=True)
def unwilling(self, times):
    note(f"unwilling {{self.request.delivery_info['redelivered']}}")
    with open({notes!r}) as file:
        if file.read().count("unwilling") <= times:
            raise Reject(requeue=True)

@app.task(shared=False, bind=True, acks_late=True, max_retries=None)
def persistent(self, times):
    note(f"persistent {{self.request.retries}}")
    if self.request.retries < times:
        raise self.retry(countdown=0)

@app.task(shared=False, acks_late=True, reject_on_worker_lost=True)
def suicidal():
    note("suicidal")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def stubborn(make_shop: MakeShop, **options: object) -> Shop:
    """A shop with tasks that do not want to end. The lease is longer than the tests: nothing comes back by itself."""
    shop = make_shop(lease=600, poll=0.02, **options)
    with (shop.folder / "shop.py").open("a") as file:
        file.write(STUBBORN.format(notes=str(shop.notes_file)))
    return shop


@pytest.fixture
def shop(make_shop: MakeShop) -> Shop:
    return stubborn(make_shop)


@pytest.mark.parametrize("pool", ["prefork", "solo", pytest.param("threads", marks=pytest.mark.soak)])
def test_a_late_task_that_has_ended_is_acked_at_once(shop: Shop, queue: DBQueue, pool: str) -> None:
    """Half a second after its end its worker is killed, and that was time enough: also where the next task keeps the event loop."""
    worker = shop.worker(pool=pool, size=1)
    shop.app.late.delay("a", 0)
    shop.app.late.delay("b", 600)
    shop.wait_for_note("start b")
    threading.Event().wait(0.5)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    assert shop.notes == ["start a", "end a", "start b"]
    assert queue.counts("shop") == {"acked": 1, "running": 1}


def waiting(queue: DBQueue) -> tuple[int, float] | None:
    """The attempts so far and the wait in seconds of the one message that was put back and is not due yet."""
    rows = queue.database.read(
        lambda session: session.execute(f"SELECT attempt, run_at - updated_at FROM dbqueue_jobs WHERE {WAITS}")
    )
    return (int(rows[0][0]), rows[0][1] / SECOND) if rows else None


def make_due(queue: DBQueue) -> None:
    with queue.database.transaction() as session:
        session.execute(f"UPDATE dbqueue_jobs SET run_at = updated_at WHERE {WAITS}")


def skip_waits(queue: DBQueue, until: int) -> dict[int, float]:
    """Makes the message due whenever it waits, until it has so many attempts; returns its waits in seconds, by attempts."""
    waits: dict[int, float] = {}
    while until not in waits:
        attempt, wait = wait_for(lambda: waiting(queue), 30, f"it waits no more, after {waits}")
        waits[attempt] = wait
        make_due(queue)
    return waits


def assert_waits(waits: dict[int, float], until: int) -> None:
    assert list(waits) == list(range(REQUEUES_AT_ONCE + 1, until + 1))
    for attempt, wait in waits.items():
        assert wait == pytest.approx(min(2 ** (attempt - REQUEUES_AT_ONCE), LONGEST_WAIT), abs=0.01)


@pytest.mark.soak
def test_a_message_that_is_requeued_a_hundred_times(shop: Shop, queue: DBQueue) -> None:
    """It waits longer and longer, a minute at last, and is neither lost nor dead: whoever takes it in the end has it."""
    worker = shop.worker(size=1)
    shop.app.unwilling.delay(100)
    assert_waits(skip_waits(queue, 100), 100)
    wait_for(lambda: queue.counts("shop") == {"acked": 1}, 30, "it was not acked")
    assert shop.notes == ["unwilling False"] + ["unwilling True"] * 100
    (record,) = queue.jobs(queue="shop")
    assert (record.attempt, record.lapses) == (101, 0)
    assert worker.poll() is None


@pytest.mark.soak
def test_fifty_retries_without_a_limit(shop: Shop, queue: DBQueue) -> None:
    """Each is a message of its own, with the task's id, and none of them is left."""
    shop.worker(size=2)
    task = shop.app.persistent.delay(50)
    wait_for(lambda: queue.counts("shop") == {"acked": 51}, 60, "not all retries came")
    assert shop.notes == [f"persistent {n}" for n in range(51)]
    records = queue.jobs(queue="shop", limit=100)
    assert {(record.task_id, record.attempt, record.lapses) for record in records} == {(task.id, 1, 0)}


@pytest.mark.soak  # Celery takes some seconds to notice each dead child
def test_a_task_that_kills_its_children_ends_dead(make_shop: MakeShop, queue: DBQueue) -> None:
    """After as many deliveries as the option says; while it waits for the next one, others are served."""
    shop = stubborn(make_shop, delivery_limit=5)
    worker = shop.worker(size=1)
    shop.app.suicidal.delay()
    for n in (3, 4):
        attempt, _ = wait_for(lambda: waiting(queue), 60, "it was not put back")
        assert attempt == n
        shop.app.add.delay(n, 0)
        shop.wait_for_note(f"add {n} 0")
        make_due(queue)
    wait_for(lambda: queue.counts("shop") == {"acked": 2, "dead": 1}, 60, "it does not end")
    assert shop.notes.count("suicidal") == 5
    (record,) = queue.jobs(queue="shop", state="dead")
    assert (record.attempt, record.lapses, record.error_kind) == (5, 0, "rejected")
    assert worker.poll() is None


def held_again(connect: Connect, queue: DBQueue, *, attempt: int, lapses: int, **options: Any) -> Any:
    """A channel whose queue ``q`` has one message that was delivered so often before."""
    channel = connect(**options).channel()
    kombu.Queue("q", routing_key="q")(channel).declare()
    kombu.Producer(channel).publish(1, routing_key="q")
    set_columns(queue.database, queue.jobs(queue="q")[0].id.bytes, attempt=attempt, lapses=lapses)
    return channel


def put_back(channel: Any, queue: DBQueue) -> None:
    channel.basic_get("q").requeue()
    wait_for(lambda: queue.counts("q").get("running", 0) == 0, 10)


def test_without_a_limit_a_message_may_be_put_back_for_ever(connect: Connect, queue: DBQueue) -> None:
    put_back(held_again(connect, queue, attempt=1_000_000, lapses=MOST_LAPSES - 1), queue)
    assert queue.counts("q") == {"pending": 1}
    assert waiting(queue) == (1_000_001, LONGEST_WAIT)


def test_lost_leases_count_neither_for_the_wait_nor_for_the_limit(connect: Connect, queue: DBQueue) -> None:
    channel = held_again(connect, queue, attempt=7, lapses=7, delivery_limit=4)
    for _ in range(2):
        put_back(channel, queue)
        assert waiting(queue) is None
    put_back(channel, queue)
    assert waiting(queue) == (10, 2)
    make_due(queue)
    wait_for(lambda: queue.counts("q") == {"pending": 1} and waiting(queue) is None, 10)
    put_back(channel, queue)
    assert queue.counts("q") == {"dead": 1}


@pytest.mark.parametrize("how", ["requeued", "recovered"])
def test_a_message_that_is_put_back_ends_dead_by_its_limit(connect: Connect, queue: DBQueue, how: str) -> None:
    channel = connect(delivery_limit=2).channel()
    kombu.Queue("q", routing_key="q")(channel).declare()
    kombu.Producer(channel).publish(1, routing_key="q")
    for n in range(2):
        assert queue.counts("q") == {"pending": 1}
        message = channel.basic_get("q")
        assert message.delivery_info["redelivered"] is (n > 0)
        if how == "requeued":
            message.requeue()
        else:
            channel.basic_recover(requeue=True)
        wait_for(lambda: queue.counts("q").get("running", 0) == 0, 10)
    assert queue.counts("q") == {"dead": 1}
    assert queue.jobs(state="dead")[0].attempt == 2
