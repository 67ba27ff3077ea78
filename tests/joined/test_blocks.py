"""Where a block begins and ends: threads, tasks and generators that inherit one, and blocks in blocks."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import orm

from dbqueue import Code, TransactionClosed, using
from tests.joined.callers import Caller, engine_of, kinds
from tests.joined.shop import Order, Shop

pytestmark = pytest.mark.req("D5")


@pytest.fixture
def connection(shop: Shop) -> Iterator[Any]:
    with closing(shop.connect(**({} if shop.postgres else {"check_same_thread": False}))) as connection:
        yield connection


def test_a_thread_that_inherited_the_block_is_refused_after_its_end(shop: Shop, connection: Any) -> None:
    said: list[object] = []
    ended = threading.Event()

    def elsewhere() -> None:
        shop.ship.enqueue(Order(1))  # still inside
        said.append("joined")
        ended.wait(10)
        for call in (
            lambda: shop.ship.enqueue(Order(2)),
            lambda: shop.ship.enqueue_many([Order(2)]),
            lambda: shop.queue.send("mail", 1),
            lambda: shop.queue.cancel(job.id),
        ):
            try:
                call()
            except TransactionClosed as error:
                said.append(error.code)
        with using(connection):  # a block of its own is another matter
            shop.ship.enqueue(Order(3))
        try:
            shop.ship.enqueue(Order(4))
        except TransactionClosed as error:
            said.append(error.code)

    with using(connection):
        job = shop.ship.enqueue(Order(0))
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(elsewhere))
        thread.start()
        while not said and thread.is_alive():
            thread.join(0.001)
    ended.set()
    thread.join()
    assert said == ["joined", *[Code.TRANSACTION_CLOSED] * 5]
    assert shop.jobs() == []
    connection.commit()
    assert shop.jobs() == [0, 1, 3]


def test_a_thread_inherits_nothing_by_itself(shop: Shop, connection: Any) -> None:
    with using(connection):
        thread = threading.Thread(target=lambda: shop.ship.enqueue(Order(1)))
        thread.start()
        thread.join()
        assert shop.jobs() == [1]


def test_a_task_that_inherited_the_block_is_refused_after_its_end(shop: Shop, connection: Any) -> None:
    async def later(ended: asyncio.Event) -> None:
        shop.ship.enqueue(Order(1))
        await ended.wait()
        with pytest.raises(TransactionClosed, match="outside of it"):
            shop.ship.enqueue(Order(2))

    async def main() -> None:
        ended = asyncio.Event()
        with using(connection):
            task = asyncio.create_task(later(ended))
            await asyncio.sleep(0)  # it has begun
        ended.set()
        await task

    asyncio.run(main())
    connection.commit()
    assert shop.jobs() == [1]


@pytest.mark.databases("postgres")  # SQLite has one writer
def test_tasks_side_by_side_have_blocks_of_their_own(shop: Shop) -> None:
    async def work(number: int, everyone: list[int], all_inside: asyncio.Event) -> None:
        with closing(shop.connect()) as connection:
            with using(connection):
                everyone.append(number)
                if len(everyone) == 5:
                    all_inside.set()
                await all_inside.wait()
                shop.ship.enqueue(Order(number))
            if number % 2:
                connection.commit()

    async def main() -> None:
        everyone: list[int] = []
        all_inside = asyncio.Event()
        await asyncio.gather(*(work(number, everyone, all_inside) for number in range(5)))

    asyncio.run(main())
    assert shop.jobs() == [1, 3]


def test_a_closed_block_lets_go_of_the_connection(shop: Shop) -> None:
    """A thread that inherited the block may live on for long."""
    engine = engine_of(shop)
    session = orm.Session(engine)
    with using(session):
        shop.ship.enqueue(Order(1))
        context = contextvars.copy_context()
    session.close()
    gone = weakref.ref(session)
    del session
    assert gone() is None
    with pytest.raises(TransactionClosed):
        context.run(shop.ship.enqueue, Order(2))
    engine.dispose()


# -- generators: they run in the context of whoever asks for the next value --------------------------------------------


def test_a_generator_asked_after_the_end_is_outside(shop: Shop, connection: Any) -> None:
    def numbers() -> Iterator[int]:
        for number in (1, 2):
            shop.ship.enqueue(Order(number))
            yield number

    with using(connection):
        generator = numbers()
        next(generator)
    connection.rollback()
    next(generator)  # asked from outside: a transaction of its own, which has ended by now
    assert shop.jobs() == [2]


def test_a_generator_that_holds_a_block_and_ends_out_of_turn(shop: Shop, connection: Any) -> None:
    def holding(given: Any) -> Iterator[None]:
        with using(given):
            yield

    with closing(shop.connect()) as other:
        first = holding(other)
        next(first)
        with using(connection):
            first.close()  # must not end the block around it
            shop.ship.enqueue(Order(1))
            assert shop.jobs() == []
        connection.commit()
        shop.ship.enqueue(Order(2))  # and both are over now
        assert shop.jobs() == [1, 2]


def test_a_generator_that_ends_in_another_context(shop: Shop, connection: Any) -> None:
    """As a web framework does with a dependency that yields."""

    def holding() -> Iterator[None]:
        with using(connection):
            yield

    generator = holding()
    entered = contextvars.copy_context()
    entered.run(next, generator)
    entered.run(shop.ship.enqueue, Order(1))
    contextvars.copy_context().run(generator.close)
    with pytest.raises(TransactionClosed):
        entered.run(shop.ship.enqueue, Order(2))
    connection.commit()
    shop.ship.enqueue(Order(3))
    assert shop.jobs() == [1, 3]


def test_an_async_generator_that_is_left_early(shop: Shop, connection: Any) -> None:
    async def holding() -> AsyncIterator[int]:
        with using(connection):
            yield 1
            yield 2

    async def main() -> None:
        generator = holding()
        async for _ in generator:
            shop.ship.enqueue(Order(1))
            break
        await generator.aclose()
        connection.commit()
        shop.ship.enqueue(Order(2))

    asyncio.run(main())
    assert shop.jobs() == [1, 2]


# -- blocks in blocks --------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
def test_the_innermost_counts(shop: Shop, connection: Any) -> None:
    with closing(shop.connect()) as other, using(connection):
        shop.ship.enqueue(Order(1))
        with using(other):
            shop.ship.enqueue(Order(2))
        shop.ship.enqueue(Order(3))
        other.commit()
        assert shop.jobs() == [2]
        connection.commit()
        assert shop.jobs() == [1, 2, 3]


def test_two_queues_in_one_block(shop: Shop, make_shop: Callable[..., Shop], connection: Any) -> None:
    """Another queue on the same tables joins the same transaction."""
    second = type(shop.queue)(shop.url)
    with using(connection):
        shop.ship.enqueue(Order(1))
        second.send("mail", {"number": 2})
    assert shop.jobs() == []
    connection.commit()
    assert shop.jobs() == [1, 2]
    second.close()


@pytest.mark.parametrize("kind", kinds("session", "session+psycopg"), ids=str)
def test_as_a_decorator(shop: Shop, caller: Caller) -> None:
    @using(caller.given)
    def work() -> None:
        shop.ship.enqueue(Order(1))

    work()
    assert shop.jobs() == []
    caller.commit()
    assert shop.jobs() == [1]
