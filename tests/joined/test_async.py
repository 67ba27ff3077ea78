"""Async SQLAlchemy: jobs wait in memory and are written by the session's own commit, just before COMMIT is sent."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.ext.asyncio import create_async_engine as create_engine

from dbqueue import DifferentDatabase, EnqueueFailed, NotInTransaction, NotSupported, using
from tests.joined.shop import Order, Shop

pytestmark = pytest.mark.req("D5")

AsyncGiven = AsyncSession | AsyncConnection


@pytest.fixture(params=["aiosqlite", "asyncpg", "psycopg"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def engine_of(shop: Shop, driver: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    family = "postgresql" if shop.postgres else "sqlite"
    engine = create_engine(sqlalchemy.make_url(shop.url).set(drivername=f"{family}+{driver}"), **options)
    try:
        yield engine
    finally:
        await engine.dispose()


@asynccontextmanager
async def opened(shop: Shop, driver: str, given: str, **options: Any) -> AsyncIterator[AsyncGiven]:
    """A session or a connection, which is closed at the end without a commit."""
    async with engine_of(shop, driver, **options) as engine:
        opened = AsyncSession(engine) if given == "session" else engine.connect()
        async with opened:
            yield opened


async def order(given: AsyncGiven, number: int) -> None:
    await given.execute(sqlalchemy.text(f"INSERT INTO orders VALUES ({number})"))


Scenario = Callable[[AsyncGiven], Awaitable[None]]


@pytest.fixture(params=["session", "connection"])
def run(request: pytest.FixtureRequest, shop: Shop, driver: str) -> Callable[[Scenario], None]:
    """Runs a scenario with a fresh session or connection in an event loop of its own."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with opened(shop, driver, request.param) as given:
                await scenario(given)

        asyncio.run(main())

    return run


def test_both_are_there_after_commit(shop: Shop, run: Callable[[Scenario], None]) -> None:
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


def test_neither_is_there_after_rollback(shop: Shop, run: Callable[[Scenario], None]) -> None:
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
def test_the_job_may_be_the_first_or_only_statement(shop: Shop, run: Callable[[Scenario], None], end: str) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            shop.ship.enqueue(Order(1))
        await getattr(given, end)()
        assert shop.jobs() == ([1] if end == "commit" else [])

    run(scenario)


def test_closing_without_a_commit_leaves_neither(shop: Shop, run: Callable[[Scenario], None]) -> None:
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


def test_a_savepoint_takes_its_jobs_along(shop: Shop, run: Callable[[Scenario], None]) -> None:
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


def test_a_savepoint_that_began_before_the_first_block(shop: Shop, run: Callable[[Scenario], None]) -> None:
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


def test_a_released_savepoint_goes_with_the_transaction(shop: Shop, run: Callable[[Scenario], None]) -> None:
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


def test_a_savepoint_that_the_outer_commit_finds_open(shop: Shop, run: Callable[[Scenario], None]) -> None:
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


def test_two_blocks_on_one_transaction(shop: Shop, run: Callable[[Scenario], None]) -> None:
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
def test_a_keyed_job_is_known_at_commit_only(shop: Shop, run: Callable[[Scenario], None]) -> None:
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


def test_written_exactly_once_and_before_the_commit(shop: Shop, run: Callable[[Scenario], None]) -> None:
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
    assert writes[:2] == ["WITH" if shop.postgres else "INSERT", "COMMIT"]
    assert len(writes) == 2


def _classes(given: sqlalchemy.orm.Session | sqlalchemy.Connection) -> tuple[Any, Any]:
    """What SQLAlchemy puts around the driver's connection and cursors."""
    connection = given.connection() if isinstance(given, sqlalchemy.orm.Session) else given
    adapter: Any = connection.connection.dbapi_connection
    return type(adapter), type(adapter.cursor())


# -- failing -----------------------------------------------------------------------------------------------------------


def test_a_commit_that_cannot_write_the_job_leaves_neither(
    shop: Shop, run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        raise RuntimeError("s3cret-payload")

    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            await order(given, 1)
            shop.ship.enqueue(Order(1, "s3cret-payload"))
        with monkeypatch.context() as patch:
            patch.setattr(shop.queue.database.dialect, "enqueue", fail)
            with pytest.raises(EnqueueFailed) as caught:
                await given.commit()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "s3cret" not in str(caught.value)
        with pytest.raises(sqlalchemy.exc.SQLAlchemyError):
            await given.commit()  # not even when asked twice: the rows would come without their job
        assert shop.both() == ([], [])
        await given.rollback()
        with using(given):
            await order(given, 2)
            shop.ship.enqueue(Order(2))
        await given.commit()
        assert shop.both() == ([2], [2])

    run(scenario)
    assert len(calls) == 1


@pytest.mark.req("D10")
def test_the_errors_of_a_driver_say_nothing_of_the_job(shop: Shop, run: Callable[[Scenario], None]) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            shop.ship.enqueue(Order(1, "s3cret-payload"), key="s3cret-key")
        with pytest.raises(EnqueueFailed) as caught:
            await given.commit()
        _no_secret(caught.value)

    if shop.postgres:
        broken, mended = (f"ALTER TABLE dbqueue_jobs RENAME COLUMN {names}" for names in ("key TO no", "no TO key"))
    else:
        broken = "CREATE TRIGGER no BEFORE INSERT ON dbqueue_jobs BEGIN SELECT RAISE(ABORT, 'no'); END"
        mended = "DROP TRIGGER no"
    shop.look(broken)
    try:
        run(scenario)
    finally:
        shop.look(mended)
    assert shop.both() == ([], [])


def _no_secret(error: BaseException | None) -> None:
    assert error is not None
    assert error.__cause__ is not None
    while error is not None:
        assert "s3cret" not in str(error)
        error = error.__cause__


def test_another_database_is_refused_by_the_commit(shop: Shop, make_shop: Callable[..., Shop], driver: str) -> None:
    for migrated in (True, False):
        other = make_shop(migrated=migrated)

        async def main(given: str, other: Shop = other) -> None:
            async with opened(other, driver, given) as joined:
                with using(joined):
                    await order(joined, 1)
                    shop.ship.enqueue(Order(1), key="a")
                with pytest.raises(DifferentDatabase):
                    await joined.commit()

        for given in ("session", "connection"):
            asyncio.run(main(given))
        assert shop.both() == ([], [])
        assert other.orders() == []
        if migrated:
            assert other.jobs() == []


@pytest.mark.parametrize("given", ["session", "connection"])
@pytest.mark.parametrize("where", ["engine", "options"])
def test_autocommit_is_refused(shop: Shop, driver: str, given: str, where: str) -> None:
    async def main() -> None:
        asked = {"isolation_level": "AUTOCOMMIT"}
        async with engine_of(shop, driver, **(asked if where == "engine" else {})) as engine:
            engine = engine if where == "engine" else engine.execution_options(**asked)
            async with AsyncSession(engine) if given == "session" else engine.connect() as opened:
                with using(opened), pytest.raises(NotInTransaction):
                    shop.ship.enqueue(Order(1))  # at once, before the caller wrote anything
                await order(opened, 1)
                await opened.commit()
        assert shop.both() == ([1], [])

    asyncio.run(main())


def test_autocommit_asked_for_by_the_session_is_refused_by_its_commit(shop: Shop, driver: str) -> None:
    async def main() -> None:
        async with opened(shop, driver, "session") as session:
            assert isinstance(session, AsyncSession)
            await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            with using(session):
                shop.ship.enqueue(Order(1))
            with pytest.raises(NotInTransaction):
                await session.commit()
        assert shop.jobs() == []

    asyncio.run(main())


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


def test_what_cannot_be_waited_for_is_refused(shop: Shop, run: Callable[[Scenario], None]) -> None:
    async def scenario(given: AsyncGiven) -> None:
        job = shop.ship.enqueue(Order(1))
        with using(given):
            with pytest.raises(NotSupported, match="async"):
                shop.queue.cancel(job.id)
            assert shop.queue.get_job(job.id) is not None

    run(scenario)


def test_what_is_not_open_or_not_begun_is_refused(shop: Shop, driver: str) -> None:
    async def main() -> None:
        async with engine_of(shop, driver) as engine:
            with pytest.raises(NotSupported, match="not open yet"), using(engine.connect()):
                pass
            async with AsyncSession(engine, autobegin=False) as session:
                with using(session), pytest.raises(NotInTransaction, match="autobegin"):
                    shop.ship.enqueue(Order(1))
                async with session.begin():
                    with using(session):
                        shop.ship.enqueue(Order(2))
            async with engine.connect() as connection:
                with using(connection):
                    await connection.close()
                    with pytest.raises(EnqueueFailed):
                        shop.ship.enqueue(Order(3))
            async with engine.connect() as connection:
                raw = await connection.get_raw_connection()
                with pytest.raises(NotSupported, match="AsyncSession"), using(raw.driver_connection):
                    pass
        assert shop.jobs() == [2]

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
