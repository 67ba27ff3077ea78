"""SQLite has one writer and snapshots: what a joined transaction may still do, and what would wait for itself."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from dbqueue import DBQueue, EnqueueFailed, TransactionTooOld, WouldDeadlock, using
from dbqueue.database.touched import SUSPICION
from tests.joined.callers import Caller, Kind, django_wrapper, engine_of, kinds
from tests.joined.shop import Order, Shop

pytestmark = [pytest.mark.req("D5"), pytest.mark.databases("sqlite")]

# Python 3.10 does not give SQLite's extended codes: there it is a lock like any other.
TOO_OLD = TransactionTooOld if sys.version_info >= (3, 11) else EnqueueFailed


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_transaction_that_read_before_another_commit_is_too_old(shop: Shop) -> None:
    with closing(shop.connect(isolation_level=None)) as connection, using(connection):
        connection.execute("BEGIN")
        connection.execute("SELECT * FROM orders")
        shop.look("INSERT INTO orders VALUES (1)")
        for _ in range(2):  # nothing but a rollback helps
            with pytest.raises(TOO_OLD) as caught:
                shop.ship.enqueue(Order(1))
            assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
        if sys.version_info >= (3, 11):
            assert "BEGIN IMMEDIATE" in str(caught.value)
        connection.execute("ROLLBACK")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("SELECT * FROM orders")
        shop.ship.enqueue(Order(2))
        connection.execute("COMMIT")
    assert shop.jobs() == [2]


@pytest.mark.parametrize("verb", ["enqueue", "key", "many", "send", "cancel"])
def test_our_first_statement_is_a_write(shop: Shop, kind: Kind, caller: Caller, verb: str) -> None:
    """So a transaction that only just began does not mind another's commit in between."""
    caller.rollback()
    kept = shop.ship.enqueue(Order(0))
    verbs: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: shop.ship.enqueue(Order(1)),
        "key": lambda: shop.ship.enqueue(Order(1), key="a"),
        "many": lambda: shop.ship.enqueue_many([Order(1)]),
        "send": lambda: shop.queue.send("mail", {"number": 1}),
        "cancel": lambda: shop.queue.cancel(kept.id),
    }
    caller.begin()
    with using(caller.given):
        if kind.name != "sqlite3+immediate":  # that one has the lock already
            shop.look("INSERT INTO orders VALUES (1)")
        verbs[verb]()
        caller.commit()
    assert shop.jobs() == ([] if verb == "cancel" else [0, 1])


@pytest.mark.parametrize("verb", ["enqueue", "key", "many", "cancel", "retry"])
def test_nothing_is_read_before_that_write(shop: Shop, verb: str) -> None:
    """Another commit at the very moment of the write does no harm, since no look of ours has taken a snapshot before."""
    pending = shop.ship.enqueue(Order(0)).id
    cancelled = shop.ship.enqueue(Order(0)).id
    shop.queue.cancel(cancelled)
    verbs: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: shop.ship.enqueue(Order(1)),
        "key": lambda: shop.ship.enqueue(Order(1), key="a"),
        "many": lambda: shop.ship.enqueue_many([Order(1)]),
        "cancel": lambda: shop.queue.cancel(pending),
        "retry": lambda: shop.queue.retry(cancelled),
    }
    with closing(shop.connect(isolation_level=None)) as connection:
        connection.execute("BEGIN")

        def commit_elsewhere(statement: str) -> None:
            if statement.strip().startswith(("INSERT", "UPDATE", "DELETE")):
                connection.set_trace_callback(None)
                shop.look("INSERT INTO orders VALUES (1)")

        connection.set_trace_callback(commit_elsewhere)
        with using(connection):
            verbs[verb]()
        connection.execute("COMMIT")
    assert shop.both() == ([1], {"cancel": [], "retry": [0, 0]}.get(verb, [0, 1]))


# -- waiting for oneself -----------------------------------------------------------------------------------------------


WHILE = 2 * SUSPICION

# Python 3.10 offers no way to follow a plain connection without keeping it alive: there such a write waits out its patience.
followed = pytest.mark.skipif(sys.version_info < (3, 11), reason="a plain connection cannot be followed")


@contextmanager
def at_once() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 2.0  # the patience is 10 seconds


def test_a_write_of_our_own_would_wait_for_this_thread(shop: Shop, caller: Caller) -> None:
    if sys.version_info < (3, 11) and isinstance(caller.given, sqlite3.Connection):
        pytest.skip("a plain connection cannot be followed")
    with using(caller.given):
        job = shop.ship.enqueue(Order(1))
    with at_once(), pytest.raises(WouldDeadlock, match="commit first"):
        shop.ship.enqueue(Order(2))
    assert shop.queue.get_job(job.id) is None  # reading waits for nobody
    with using(caller.given):
        shop.ship.enqueue(Order(3))
    caller.commit()
    shop.ship.enqueue(Order(4))
    assert shop.jobs() == [1, 3, 4]


@pytest.mark.parametrize("kind", kinds("session"), ids=str)
def test_so_would_every_write_of_our_own(shop: Shop, caller: Caller) -> None:
    shop.queue.send("mail", {"number": 0})
    claimed = shop.queue.claim("mail", "w")
    assert claimed is not None
    with using(caller.given):
        job = shop.ship.enqueue(Order(1))
    own_writes: list[Callable[[], Any]] = [
        lambda: shop.ship.enqueue_many([Order(2), Order(3)]),
        lambda: shop.queue.cancel(job.id),
        lambda: shop.queue.claim("mail", "w"),
        claimed.heartbeat,
        claimed.ack,
        lambda: shop.queue.purge(["dead"]),
    ]
    for write in own_writes:
        with at_once(), pytest.raises(WouldDeadlock, match="commit first"):
            write()
    caller.commit()
    claimed.ack()
    assert shop.jobs() == [1]


FEW = pytest.mark.parametrize(
    "kind", kinds("session", "connection", "sqlite3", "sqlite3+begin", "django-wrapper"), ids=str
)


@FEW
@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_not_when_the_transaction_has_ended(shop: Shop, caller: Caller, end: str) -> None:
    with using(caller.given):
        shop.ship.enqueue(Order(1))
    getattr(caller, end)()
    with held_for_a_while(shop):  # by somebody else
        shop.ship.enqueue(Order(2))
    assert shop.jobs() == ([1, 2] if end == "commit" else [2])


@contextmanager
def held_for_a_while(shop: Shop) -> Iterator[None]:
    """The lock, until a write of ours has waited long enough to have its suspicions."""
    other = shop.connect(check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(WHILE, other.rollback)
    timer.start()
    yield
    timer.join()
    other.close()


@pytest.mark.parametrize("kind", kinds("sqlite3"), ids=str)
def test_not_for_another_file(shop: Shop, make_shop: Callable[..., Shop], caller: Caller) -> None:
    other = make_shop()
    with using(caller.given):
        shop.ship.enqueue(Order(1))
    with held_for_a_while(other):
        other.ship.enqueue(Order(2))
    assert other.jobs() == [2]


def test_not_for_another_thread(shop: Shop) -> None:
    with closing(shop.connect(check_same_thread=False)) as connection:
        with using(connection):
            shop.ship.enqueue(Order(1))
        failed: list[BaseException] = []

        def elsewhere() -> None:
            try:
                shop.ship.enqueue(Order(2))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(WHILE)
        assert thread.is_alive()  # it waits as for any other writer
        connection.commit()
        thread.join()
    assert failed == []
    assert shop.jobs() == [1, 2]


def test_not_for_a_pooled_connection_that_serves_another_thread_now(shop: Shop) -> None:
    engine = engine_of(shop, pool_size=1, max_overflow=0)
    with engine.connect() as connection:
        with using(connection):
            shop.ship.enqueue(Order(1))
        connection.commit()
    begun, end = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("INSERT INTO orders VALUES (1)"))
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    begun.wait(10)
    timer = threading.Timer(WHILE, end.set)
    timer.start()
    shop.ship.enqueue(Order(2))
    thread.join()
    timer.join()
    engine.dispose()
    assert shop.jobs() == [1, 2]


def test_not_for_a_later_connection_at_the_same_address(shop: Shop) -> None:
    def once() -> int:
        with closing(shop.connect()) as connection:
            with using(connection):
                shop.ship.enqueue(Order(1))
            connection.commit()
            return id(connection)

    address = once()
    gc.collect()
    later = [shop.connect(check_same_thread=False) for _ in range(20)]
    other = next((connection for connection in later if id(connection) == address), later[0])
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(WHILE, other.rollback)
    timer.start()
    shop.ship.enqueue(Order(2))
    timer.join()
    for connection in later:
        connection.close()
    assert shop.jobs() == [1, 2]


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_connection_is_not_kept_alive(shop: Shop) -> None:
    """Its lock would be kept, too. (CPython frees it in its next collection: it is in a cycle with its own cache.)"""

    def careless() -> None:
        connection = shop.connect()
        with using(connection):
            shop.ship.enqueue(Order(1))

    careless()
    gc.collect()
    with at_once(), closing(shop.connect(timeout=0)) as other:
        other.execute("INSERT INTO orders VALUES (1)")
        other.commit()
    shop.ship.enqueue(Order(2))
    assert shop.both() == ([1], [2])


def test_inside_run_sync_too(shop: Shop) -> None:
    async def main() -> None:
        engine = create_async_engine(sqlalchemy.make_url(shop.url).set(drivername="sqlite+aiosqlite"))
        async with AsyncSession(engine) as session:

            def work(sync_session: orm.Session) -> None:
                with using(sync_session):
                    shop.ship.enqueue(Order(1))

            await session.run_sync(work)
            with at_once(), pytest.raises(WouldDeadlock):
                shop.ship.enqueue(Order(2))
            await session.commit()
            shop.ship.enqueue(Order(3))
        await engine.dispose()

    asyncio.run(main())
    assert shop.jobs() == [1, 3]


@followed
@pytest.mark.req("D6")
def test_the_first_migration_would_wait_for_this_thread(make_shop: Callable[..., Shop]) -> None:
    """Another queue with tables of its own in the same file."""
    shop = make_shop()
    other = DBQueue(shop.url, prefix="mine_", auto_migrate=True)
    with closing(shop.connect()) as connection:
        with using(connection):
            shop.ship.enqueue(Order(1))
        with at_once(), pytest.raises(WouldDeadlock):
            other.send("mail", 1)
        connection.commit()
        other.send("mail", 1)
    other.close()
    assert shop.jobs() == [1]


def test_django_by_its_wrapper(shop: Shop) -> None:
    from django.db import transaction

    wrapper = django_wrapper(shop)
    with transaction.atomic():
        with using(wrapper):
            shop.ship.enqueue(Order(1))
        with at_once(), pytest.raises(WouldDeadlock):
            shop.ship.enqueue(Order(2))
    shop.ship.enqueue(Order(3))
    wrapper.close()
    assert shop.jobs() == [1, 3]
