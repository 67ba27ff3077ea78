"""A revoke holds: for what waits, whoever is there to hear it, and for what is published later (C10)."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import kombu
import psycopg
import pytest
from celery.canvas import StampingVisitor, chord
from celery.exceptions import ChordError, TaskRevokedError

from dbqueue import DBQueue, routing
from dbqueue.kombu_transport import publishing
from dbqueue.kombu_transport.publishing import REVOKED_FOR
from tests.transport.shops import Shop
from tests.waiting import wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.req("C10")]

MakeShop = Callable[..., Shop]
Connect = Callable[..., kombu.Connection]


def ends(queue: DBQueue, task_id: str) -> list[tuple[str, str | None]]:
    """State and kind of every record of the task."""
    return [(record.state, record.error_kind) for record in queue.jobs() if record.task_id == task_id]


def tombstones(queue: DBQueue, *task_ids: str) -> set[str]:
    return queue.database.read(lambda s: routing.revoked_among(queue.database.dialect, s, task_ids))


CANCELLED = [("cancelled", "revoked")]


class Stamp(StampingVisitor):  # type: ignore[misc]
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"mark": self.value, "stamped_headers": ["mark"]}


def stamped(signature: Any, value: Any) -> Any:
    signature.stamp(visitor=Stamp(value))
    return signature


# -- with no worker up -------------------------------------------------------------------------------------------------


def test_what_waits_ends_cancelled_at_once(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    ready, kept = shop.app.add.delay(1, 1), shop.app.add.delay(2, 2)
    later = shop.app.add.apply_async((3, 3), countdown=3_600)
    others = [shop.app.add.delay(n, 0) for n in range(3)]
    shop.app.app.control.revoke(ready.id)
    later.revoke()
    shop.app.app.control.terminate([other.id for other in others])
    for result in (ready, later, *others):
        assert ends(queue, result.id) == CANCELLED
    assert ends(queue, kept.id) == [("pending", None)]


def test_the_message_of_the_revoke_need_not_be_json(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    shop.app.app.conf.update(task_serializer="pickle", accept_content=["pickle"])
    task = shop.app.add.delay(1, 1)
    shop.app.app.control.revoke(task.id)
    assert ends(queue, task.id) == CANCELLED


def test_a_revoke_for_some_workers_is_theirs_alone(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    task = shop.app.add.delay(1, 1)
    shop.app.app.control.revoke(task.id, destination=["other@shop"])
    shop.app.app.control.revoke(task.id, pattern="other*", matcher="glob")
    assert ends(queue, task.id) == [("pending", None)]
    assert tombstones(queue, task.id) == set()


def test_the_mark_and_the_memory_of_it_are_one_transaction(
    make_shop: MakeShop, queue: DBQueue, database_url: str
) -> None:
    shop = make_shop()
    task = shop.app.add.delay(1, 1)
    connection: Any = (
        sqlite3.connect(database_url.removeprefix("sqlite:///"), isolation_level=None)
        if database_url.startswith("sqlite")
        else psycopg.connect(database_url, autocommit=True)
    )
    connection.execute("ALTER TABLE dbqueue_finished RENAME TO elsewhere")
    with pytest.raises(Exception, match=r"OperationalError|UndefinedTable|tables"):
        shop.app.app.control.revoke(task.id)
    connection.execute("ALTER TABLE elsewhere RENAME TO dbqueue_finished")
    connection.close()
    assert tombstones(queue, task.id) == set()
    assert ends(queue, task.id) == [("pending", None)]
    shop.app.app.control.revoke(task.id)
    assert tombstones(queue, task.id) == {task.id}
    assert ends(queue, task.id) == CANCELLED


def test_a_claimed_message_is_left_to_its_worker(make_shop: MakeShop, queue: DBQueue, connect: Connect) -> None:
    shop = make_shop()
    task = shop.app.add.delay(1, 1)
    message = connect().channel().basic_get("shop")
    shop.app.app.control.revoke(task.id)
    assert [state for state, _ in ends(queue, task.id)] == ["running"]
    message.ack()
    wait_for(lambda: [state for state, _ in ends(queue, task.id)] == ["acked"])


def test_who_is_no_celery_worker_gets_no_revoked_message(make_shop: MakeShop, queue: DBQueue, connect: Connect) -> None:
    """Neither the notice of one that waited, nor one that was published afterwards."""
    shop = make_shop()
    first, second, kept = uuid4().hex, uuid4().hex, uuid4().hex
    shop.app.add.apply_async((1, 1), task_id=first)
    shop.app.app.control.revoke([first, second])
    for task_id in (second, kept):
        shop.app.add.apply_async((1, 1), task_id=task_id)
    got: list[Any] = []
    connection = connect()
    with connection.Consumer(kombu.Queue("shop"), callbacks=[lambda _, message: got.append(message)]):
        wait_for(lambda: connection.drain_events(timeout=10) or got, 30)
        wait_for(lambda: ends(queue, second) == CANCELLED, 30)
    assert [message.headers["id"] for message in got] == [kept]
    assert ends(queue, first) == CANCELLED
    got[0].ack()
    wait_for(lambda: queue.counts("shop") == {"acked": 2, "cancelled": 2}, 10)
    shop.app.add.apply_async((1, 1), task_id=second)
    assert connection.channel().basic_get("shop") is None
    wait_for(lambda: ends(queue, second) == CANCELLED * 2, 10)


def test_a_revoke_is_remembered_for_three_hours(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    task_ids = [uuid4().hex for _ in range(150)]
    shop.app.app.control.revoke(task_ids)
    dialect = queue.database.dialect
    queue.database.clock.advance(REVOKED_FOR - 60)
    queue.database.run(lambda s: routing.forget_revoked(dialect, s))
    assert tombstones(queue, *task_ids, "other") == set(task_ids)
    queue.database.clock.advance(120)
    assert tombstones(queue, *task_ids) == set()
    queue.database.run(lambda s: routing.forget_revoked(dialect, s))
    queue.database.clock.advance(-REVOKED_FOR)
    assert tombstones(queue, *task_ids) == set()


def test_stamped_messages_end_cancelled_at_once(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    add, control = shop.app.add, shop.app.app.control
    by_text, by_number = stamped(add.si(1, 1), "a").delay(), stamped(add.si(2, 2), 7).delay()
    later = stamped(add.si(3, 3), "a").apply_async(countdown=3_600)
    kept = [stamped(add.si(4, 4), "7").delay(), stamped(add.si(5, 5), "b").delay(), add.delay(6, 6)]
    control.revoke_by_stamped_headers({"mark": ["a", "c"]})
    control.revoke_by_stamped_headers({"mark": 7})
    for result in (by_text, by_number, later):
        assert ends(queue, result.id) == CANCELLED
    for result in kept:
        assert ends(queue, result.id) == [("pending", None)]


def test_what_many_tasks_are_revoked_by_is_many_transactions(
    make_shop: MakeShop, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of them are revoked: by their ids, and by a stamp that all carry, page by page."""
    monkeypatch.setattr(publishing, "REVOKED_AT_ONCE", 3)
    monkeypatch.setattr(publishing, "HEADS_AT_ONCE", 4)
    transactions: list[None] = []
    do = publishing.Publisher._do
    monkeypatch.setattr(
        publishing.Publisher, "_do",
        lambda self, verb, *, write, joins=True: (
            transactions.append(None) if isinstance(verb, partial) else None, do(self, verb, write=write, joins=joins)
        )[1],
    )  # fmt: skip
    shop = make_shop()
    add, control = shop.app.add, shop.app.app.control
    by_id = [add.delay(n, n) for n in range(7)]
    by_stamp = [stamped(add.si(n, n), "a").delay() for n in range(10)]
    kept = [stamped(add.si(0, 0), "b").delay(), add.delay(0, 0)]
    transactions.clear()
    control.revoke([result.id for result in by_id])
    assert len(transactions) == 3
    control.revoke_by_stamped_headers({"mark": ["a"]})
    assert len(transactions) == 7
    for result in by_id + by_stamp:
        assert ends(queue, result.id) == CANCELLED
    for result in kept:
        assert ends(queue, result.id) == [("pending", None)]
    assert tombstones(queue, *(result.id for result in by_id)) == {result.id for result in by_id}
    dialect = queue.database.dialect
    assert queue.database.read(lambda s: routing.revoked_stamps(dialect, s)) == ['["mark", "a"]']


# -- and then a worker -------------------------------------------------------------------------------------------------


def test_a_worker_tells_what_was_revoked_before_it_was_there(make_shop: MakeShop, queue: DBQueue) -> None:
    """The result is REVOKED, at once for an ETA too; what was published after its revoke is not executed either."""
    shop = make_shop(backend="rpc://")
    add, control = shop.app.add, shop.app.app.control
    revoked = [add.delay(1, 1), add.apply_async((2, 2), countdown=3_600), stamped(add.si(3, 3), "a").delay()]
    control.revoke([result.id for result in revoked])
    control.revoke_by_stamped_headers({"mark": ["a"]})
    retried = uuid4().hex
    control.revoke(retried)
    revoked += [add.apply_async((4, 4), task_id=retried), stamped(add.si(5, 5), "a").delay()]
    kept = add.delay(6, 6)
    shop.worker(pool="solo", size=1)
    for result in revoked:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
    assert kept.get(timeout=30) == 12
    assert shop.notes == ["add 6 6"]
    for result in revoked[:4]:
        assert ends(queue, result.id) == CANCELLED
    # two notices, the stamped one that came later, which is Celery's to know, and the one that ran
    wait_for(lambda: queue.counts("shop") == {"acked": 5, "cancelled": 4}, 10)


@pytest.mark.soak
def test_a_chord_hears_of_a_revoked_part(make_shop: MakeShop, queue: DBQueue, tmp_path: Any) -> None:
    shop = make_shop(backend=f"db+sqlite:///{tmp_path}/results.db")
    add = shop.app.add
    parts = [add.s(1, 1).set(task_id=uuid4().hex), add.s(2, 2)]
    body = shop.app.total.s()
    result = chord(parts)(body)
    shop.app.app.control.revoke(parts[0].options["task_id"])
    shop.worker(pool="solo", size=1)
    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=60)
    assert shop.notes == ["add 2 2"]


@pytest.mark.soak
def test_a_running_task_is_terminated_and_its_worker_goes_on(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop(backend="rpc://")
    worker = shop.worker("--prefetch-multiplier", "2", size=1)
    running, held = shop.app.slow.delay("a", 600), shop.app.slow.delay("b", 0)
    shop.wait_for_note("start a")
    wait_for(lambda: [state for state, _ in ends(queue, held.id)] == ["running"], 30, "it was not fetched")
    shop.app.app.control.revoke([running.id, held.id], terminate=True)
    for result in (running, held):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
    assert shop.app.add.delay(1, 1).get(timeout=30) == 2
    assert shop.notes == ["start a", "add 1 1"]
    wait_for(lambda: queue.counts("shop") == {"acked": 3}, 10)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


@pytest.mark.soak
def test_a_revoked_task_does_not_come_back_with_its_killed_worker(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop(lease=2)
    worker = shop.worker(size=1)
    task = shop.app.late.delay("a", 600)
    shop.wait_for_note("start a")
    worker.kill()
    shop.app.app.control.revoke(task.id)
    assert [state for state, _ in ends(queue, task.id)] == ["running"]
    shop.close()
    shop.worker(size=1)
    wait_for(lambda: ends(queue, task.id) == CANCELLED, 30)
    assert shop.notes == ["start a"]


# -- in order ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("C3")
def test_remote_control_and_tasks_come_in_the_order_they_were_sent(make_shop: MakeShop, queue: DBQueue) -> None:
    """A worker hears of a stamp before it gets a task with it that was sent a moment later; and it has the task that it is asked
    about a moment after that was sent."""
    shop = make_shop()
    add, control = shop.app.add, shop.app.app.control
    shop.worker("--prefetch-multiplier", "500", pool="solo", size=1)
    for n in range(60):
        control.revoke_by_stamped_headers({"mark": [n]})
        stamped(add.si(n, n), n).delay()
    wait_for(lambda: queue.counts("shop") == {"acked": 60}, 60)
    assert shop.notes == []
    inspect = control.inspect(["w0@shop"], timeout=10, limit=1)
    for n in range(20):
        task = add.apply_async((n, n), countdown=14)
        assert list(inspect.query_task(task.id)["w0@shop"]) == [task.id]
