"""NOTIFY belongs to the caller's transaction: sent at its commit, never after a rollback, and only while somebody sleeps."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

import psycopg
import psycopg2
import pytest

from dbqueue import using
from dbqueue.database.postgres_statements import GATE_KEY
from tests.joined.shop import Order, Shop

pytestmark = [pytest.mark.req("D5"), pytest.mark.databases("postgres")]

KEY = GATE_KEY.replace("{queue}", "'default'")


class Listener:
    """A session that listens to the queue ``default``, asleep or awake."""

    def __init__(self, shop: Shop) -> None:
        self.connection = psycopg.connect(shop.url, autocommit=True)
        self.salt = {"salt": shop.queue.database.dialect.names.salt}
        row = self.connection.execute(f"SELECT 'dbqueue_' || to_hex({KEY})", self.salt).fetchone()
        assert row is not None
        self.connection.execute(f"LISTEN {row[0]}")

    def sleep(self) -> None:
        self.connection.execute(f"SELECT pg_advisory_lock_shared({KEY})", self.salt)

    def wake(self) -> None:
        self.connection.execute(f"SELECT pg_advisory_unlock_shared({KEY})", self.salt)

    def heard(self) -> int:
        """Notifications so far. A query of our own brings all that were sent by commits before it, so nothing has to be waited for."""
        self.connection.execute("SELECT 1")
        return len(list(self.connection.notifies(timeout=0)))


@pytest.fixture
def listener(shop: Shop) -> Iterator[Listener]:
    listener = Listener(shop)
    listener.sleep()
    yield listener
    listener.connection.close()


connects = pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])


@connects
def test_heard_after_the_commit_only(shop: Shop, listener: Listener, connect: Callable[..., object]) -> None:
    with closing(connect(shop.url)) as connection:  # type: ignore[type-var]
        for enqueue in (
            lambda: shop.ship.enqueue(Order(1)),
            lambda: shop.ship.enqueue(Order(1), key="a"),
            lambda: shop.ship.enqueue_many([Order(1), Order(2)], keys=["b", None]),
        ):
            with using(connection):
                enqueue()
            assert listener.heard() == 0
            connection.commit()  # type: ignore[attr-defined]
            assert listener.heard() == 1
            assert listener.heard() == 0


@connects
def test_never_heard_after_a_rollback(shop: Shop, listener: Listener, connect: Callable[..., object]) -> None:
    with closing(connect(shop.url)) as connection:  # type: ignore[type-var]
        with using(connection):
            shop.ship.enqueue(Order(1))
            shop.ship.enqueue_many([Order(1), Order(2)])
        connection.rollback()  # type: ignore[attr-defined]
        assert listener.heard() == 0
        with using(connection):
            cursor = connection.cursor()  # type: ignore[attr-defined]
            cursor.execute("SAVEPOINT mine")
            shop.ship.enqueue(Order(1))
            cursor.execute("ROLLBACK TO SAVEPOINT mine")
        connection.commit()  # type: ignore[attr-defined]
        assert listener.heard() == 0


def test_one_transaction_is_heard_once(shop: Shop, listener: Listener) -> None:
    with psycopg.connect(shop.url) as connection, using(connection):
        for number in range(20):
            shop.ship.enqueue(Order(number))
        shop.ship.enqueue_many([Order(number) for number in range(20)])
    assert listener.heard() == 1


def test_nothing_is_sent_while_nobody_sleeps(shop: Shop, listener: Listener) -> None:
    listener.wake()
    with psycopg.connect(shop.url) as connection, using(connection):
        shop.ship.enqueue(Order(1))
        shop.ship.enqueue_many([Order(1), Order(2)])
    assert listener.heard() == 0
    listener.sleep()
    with psycopg.connect(shop.url) as connection:
        with using(connection):
            shop.ship.enqueue(Order(1))
        listener.wake()
        connection.commit()
    assert listener.heard() == 1  # it slept when the job was written; once more is harmless


def test_nothing_is_sent_for_a_duplicate_or_a_job_of_later(shop: Shop, listener: Listener) -> None:
    shop.ship.enqueue(Order(1), key="a")
    assert listener.heard() == 1
    with psycopg.connect(shop.url) as connection, using(connection):
        assert shop.ship.enqueue(Order(2), key="a").duplicate
        assert shop.ship.enqueue_many([Order(3), Order(4)], keys=["a", "a"])[1].duplicate
        shop.ship.enqueue(Order(5), delay=3600)
        shop.ship.enqueue_many([Order(6), Order(7)], delay=3600)
        shop.queue.send("mail", 1)  # another queue's sleepers
    assert listener.heard() == 0


def test_the_gate_keeps_no_lock_of_the_callers_session(shop: Shop, listener: Listener) -> None:
    listener.wake()
    with psycopg.connect(shop.url) as connection:
        with using(connection):
            job = shop.ship.enqueue(Order(1))
            shop.ship.enqueue_many([Order(2), Order(3)])
            shop.queue.cancel(job.id)
            shop.queue.retry(job.id)
        assert isinstance(job.id, uuid.UUID)
        pid = connection.info.backend_pid
        assert shop.look(f"SELECT * FROM pg_locks WHERE locktype = 'advisory' AND pid = {pid}") == []


def test_a_retry_by_hand_is_heard_too(shop: Shop, listener: Listener) -> None:
    job = shop.ship.enqueue(Order(1))
    shop.queue.cancel(job.id)
    listener.heard()
    with psycopg.connect(shop.url) as connection:
        with using(connection):
            shop.queue.retry(job.id)
        assert listener.heard() == 0
        connection.commit()
        assert listener.heard() == 1


def test_it_can_be_switched_off(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(notify=False)
    listener = Listener(shop)
    listener.sleep()
    with psycopg.connect(shop.url) as connection, using(connection):
        shop.ship.enqueue(Order(1))
        shop.ship.enqueue_many([Order(2), Order(3)])
    assert listener.heard() == 0
    listener.connection.close()
