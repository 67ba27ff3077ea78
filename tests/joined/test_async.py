"""Async SQLAlchemy: jobs wait in memory and are written by the session's own commit, just before COMMIT is sent."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker

from dbqueue import NotInTransaction, using
from tests.joined.async_callers import AsyncGiven, Run, engine_of, opened, order
from tests.joined.shop import Order, Shop

pytestmark = pytest.mark.req("D5")


def test_both_are_there_after_commit(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            await order(given, 1)
            answer = shop.ship.enqueue(Order(1))
            assert answer.duplicate is False
        assert shop.both() == ([], [])
        await given.commit()
        assert shop.both() == ([1], [1])
        await order(given, 2)
        await given.commit()
        assert shop.both() == ([1, 2], [1])  # nothing is written twice
        with using(given):
            shop.ship.enqueue(Order(3))
        await given.commit()
        assert shop.jobs() == [1, 3]

    run(scenario)


def test_neither_is_there_after_rollback(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            await order(given, 1)
            shop.ship.enqueue(Order(1))
        await given.rollback()
        assert shop.both() == ([], [])
        with using(given):
            await order(given, 2)
            shop.ship.enqueue(Order(2))
        await given.commit()
        assert shop.both() == ([2], [2])

    run(scenario)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_job_may_be_the_first_or_only_statement(shop: Shop, run: Run, end: str) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            shop.ship.enqueue(Order(1))
        await getattr(given, end)()
        assert shop.jobs() == ([1] if end == "commit" else [])

    run(scenario)


def test_closing_without_a_commit_leaves_neither(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            await order(given, 1)
            shop.ship.enqueue(Order(1))
        await given.close()
        if isinstance(given, AsyncSession):  # a closed session may be used again: what it forgot stays forgotten
            await order(given, 2)
            await given.commit()
            assert shop.both() == ([2], [])
        else:
            assert shop.both() == ([], [])

    run(scenario)


def test_a_savepoint_takes_its_jobs_along(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        async def both(number: int) -> None:
            await order(given, number)
            shop.ship.enqueue(Order(number))

        await order(given, 0)
        with using(given):
            await both(1)
            first = await given.begin_nested()
            await both(2)
            await first.rollback()
            second = await given.begin_nested()
            await both(3)
            third = await given.begin_nested()
            await both(4)
            await third.rollback()
            await both(5)
            await second.commit()
            outer = await given.begin_nested()
            inner = await given.begin_nested()
            await both(6)
            await inner.commit()
            await outer.rollback()  # what was released inside goes with the outer one
            await both(7)
        await given.commit()
        assert shop.both() == ([0, 1, 3, 5, 7], [1, 3, 5, 7])

    run(scenario)


def test_a_savepoint_that_began_before_the_first_block(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        await order(given, 0)
        for number, end in ((1, "rollback"), (2, "commit")):
            outer = await given.begin_nested()
            inner = await given.begin_nested()
            with using(given):
                await order(given, number)
                shop.ship.enqueue(Order(number))
            await inner.commit()
            await getattr(outer, end)()
        await given.commit()
        assert shop.both() == ([0, 2], [2])

    run(scenario)


def test_a_released_savepoint_goes_with_the_transaction(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        await order(given, 0)
        with using(given):
            async with given.begin_nested():
                shop.ship.enqueue(Order(1))
        await given.rollback()
        await order(given, 1)
        await given.commit()
        assert shop.both() == ([1], [])

    run(scenario)


def test_a_savepoint_that_the_outer_commit_finds_open(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        async with given.begin():
            with using(given):
                await order(given, 1)
                shop.ship.enqueue(Order(1))
                await given.begin_nested()
                await order(given, 2)
                shop.ship.enqueue(Order(2))
        assert shop.both() == ([1, 2], [1, 2])

    run(scenario)


def test_two_blocks_on_one_transaction(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            shop.ship.enqueue(Order(1))
        with using(given):
            shop.ship.enqueue(Order(2))
            with using(given):
                shop.ship.enqueue_many([Order(3), Order(4)])
        with pytest.raises(ZeroDivisionError), using(given):  # noqa: PT012
            shop.ship.enqueue(Order(5))
            raise ZeroDivisionError
        await given.commit()
        assert shop.jobs() == [1, 2, 3, 4, 5]

    run(scenario)


@pytest.mark.req("D3", "D8")
def test_a_keyed_job_is_known_at_commit_only(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        shop.ship.enqueue(Order(1), key="taken")
        with using(given):
            assert shop.ship.enqueue(Order(2), key="taken").duplicate is None
            fresh = shop.ship.enqueue(Order(3), key="free")
            assert fresh.duplicate is None
            assert shop.ship.enqueue(Order(4), key="free").duplicate is None
            many = shop.ship.enqueue_many([Order(5), Order(6)], keys=["free", None])
            assert [ref.duplicate for ref in many] == [None, False]
        await given.commit()
        assert shop.jobs() == [1, 3, 6]
        assert shop.queue.get_job(fresh.id) is not None

    run(scenario)


def test_a_session_that_writes_objects_only(shop: Shop, driver: str) -> None:
    """The usual shape: objects are added, and flushed by the commit itself."""
    table = sqlalchemy.Table(
        "orders", sqlalchemy.MetaData(), sqlalchemy.Column("number", sqlalchemy.Integer, primary_key=True)
    )

    class Row:
        number: int

    mapping = sqlalchemy.orm.registry()
    mapping.map_imperatively(Row, table)

    async def main() -> None:
        async with engine_of(shop, driver) as engine:
            sessions = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
            for number in (1, 1, 2):
                row = Row()
                row.number = number
                session = sessions()
                try:
                    async with session.begin():
                        with using(sessions):
                            session.add(row)
                            shop.ship.enqueue(Order(number))
                except sqlalchemy.exc.IntegrityError:  # at the commit's flush; the second 1
                    assert number == 1
            await sessions.remove()
        assert shop.both() == ([1, 2], [1, 2])

        async with engine_of(shop, driver) as engine, AsyncSession(engine) as session:
            with using(session):
                shop.ship.enqueue(Order(3))
                try:
                    async with session.begin_nested():  # whose flush fails at its end: that is its affair alone
                        row = Row()
                        row.number = 2
                        session.add(row)
                        shop.ship.enqueue(Order(4))
                except sqlalchemy.exc.IntegrityError:
                    pass
            await session.commit()
        assert shop.both() == ([1, 2], [1, 2, 3])

    asyncio.run(main())
    mapping.dispose()


def test_inside_run_sync_the_job_is_written_at_once(shop: Shop, driver: str) -> None:
    async def main() -> None:
        async with opened(shop, driver, "session") as session:
            assert isinstance(session, AsyncSession)

            def work(sync_session: sqlalchemy.orm.Session) -> None:
                with using(sync_session):
                    sync_session.execute(sqlalchemy.text("INSERT INTO orders VALUES (1)"))
                    kept = shop.ship.enqueue(Order(1), key="a")
                    assert kept.duplicate is False
                    assert shop.ship.enqueue(Order(2), key="a") == type(kept)(kept.id, True)
                    assert shop.queue.get_job(kept.id) is not None
                    with sync_session.begin_nested() as savepoint:
                        shop.ship.enqueue_many([Order(3), Order(4)])
                        savepoint.rollback()
                    shop.ship.enqueue(Order(5))

            await session.run_sync(work)
            assert shop.both() == ([], [])
            await session.commit()
            assert shop.both() == ([1], [1, 5])

        async with opened(shop, driver, "connection") as connection:

            def more(sync_connection: sqlalchemy.Connection) -> None:
                with using(sync_connection):
                    shop.ship.enqueue(Order(6))

            await connection.run_sync(more)
            await connection.commit()
        assert shop.jobs() == [1, 5, 6]

    asyncio.run(main())


def test_a_session_on_a_connection_of_the_callers(shop: Shop, driver: str) -> None:
    """Then the connection's own transaction decides: the session's commit may be a savepoint's release, or nothing at all."""

    async def main() -> None:
        async with engine_of(shop, driver) as engine:
            async with engine.connect() as connection:
                await order(connection, 1)
                async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                    with using(session):
                        await order(session, 2)
                        shop.ship.enqueue(Order(2))
                    await session.rollback()
                    with using(session):
                        await order(session, 3)
                        shop.ship.enqueue(Order(3))
                    await session.commit()
                assert shop.both() == ([], [])
                await connection.commit()
            assert shop.both() == ([1, 3], [3])
            async with engine.connect() as connection:
                await order(connection, 4)
                async with AsyncSession(connection) as session:
                    with using(session):
                        await order(session, 5)
                        shop.ship.enqueue(Order(5))
                await connection.commit()  # the session never committed, but its row is there, and so is the job
            assert shop.both() == ([1, 3, 4, 5], [3, 5])

    asyncio.run(main())


def test_written_exactly_once_and_before_the_commit(shop: Shop, run: Run) -> None:
    seen: list[str] = []

    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            await order(given, 1)
            shop.ship.enqueue(Order(1))
        adapter, cursor = await given.run_sync(_classes)
        execute, commit = cursor.execute, adapter.commit
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cursor, "execute", lambda c, *a, **k: seen.append(a[0].split()[0]) or execute(c, *a, **k))
            patch.setattr(adapter, "commit", lambda c: seen.append("COMMIT") or commit(c))
            await given.commit()
            await given.commit()

    run(scenario)
    assert shop.both() == ([1], [1])
    writes = [word for word in seen if word in ("WITH", "INSERT", "COMMIT")]
    assert writes[:2] == ["INSERT", "COMMIT"]
    assert len(writes) == 2


def _classes(given: sqlalchemy.orm.Session | sqlalchemy.Connection) -> tuple[Any, Any]:
    """What SQLAlchemy puts around the driver's connection and cursors."""
    connection = given.connection() if isinstance(given, sqlalchemy.orm.Session) else given
    adapter: Any = connection.connection.dbapi_connection
    return type(adapter), type(adapter.cursor())


@pytest.mark.databases("sqlite")
def test_the_recipe_that_begins_by_an_event_is_a_transaction(shop: Shop) -> None:
    async def main() -> None:
        async with engine_of(shop, "aiosqlite") as engine:

            @event.listens_for(engine.sync_engine, "connect")
            def connect(connection: Any, record: Any) -> None:
                connection.isolation_level = None

            @event.listens_for(engine.sync_engine, "begin")
            def begin(connection: sqlalchemy.Connection) -> None:
                connection.exec_driver_sql("BEGIN")

            async with engine.connect() as connection:
                with using(connection), pytest.raises(NotInTransaction, match=r"connection\.begin\(\)"):
                    shop.ship.enqueue(Order(1))
                async with connection.begin():
                    with using(connection):
                        shop.ship.enqueue(Order(2))
                        async with connection.begin_nested() as savepoint:
                            shop.ship.enqueue(Order(3))
                            await savepoint.rollback()
            async with AsyncSession(engine) as session:
                with using(session):
                    shop.ship.enqueue(Order(4))
                await session.commit()
        assert shop.jobs() == [2, 4]

    asyncio.run(main())


def test_an_abandoned_session_is_forgotten(shop: Shop, driver: str) -> None:
    async def main() -> None:
        async with engine_of(shop, driver) as engine:
            session = AsyncSession(engine)
            with using(session):
                shop.ship.enqueue(Order(1))
            sync_session = session.sync_session
            del session
            gone = weakref.ref(sync_session)
            del sync_session
            gc.collect()
            assert gone() is None
        assert shop.jobs() == []

    asyncio.run(main())
