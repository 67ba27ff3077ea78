"""Async SQLAlchemy: a commit that cannot write the job fails, and neither rows nor jobs are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession

from dbqueue import DifferentDatabase, EnqueueFailed, NotInTransaction, NotSupported, using
from tests.joined.async_callers import AsyncGiven, Run, engine_of, opened, order
from tests.joined.shop import Order, Shop
from tests.servers import Server

pytestmark = pytest.mark.req("D5")


def test_a_commit_that_cannot_write_the_job_leaves_neither(
    shop: Shop, run: Run, monkeypatch: pytest.MonkeyPatch
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
def test_the_errors_of_a_driver_say_nothing_of_the_job(shop: Shop, run: Run) -> None:
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


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("given", ["session", "connection"])
def test_a_connection_that_is_cut_before_the_commit(shop: Shop, postgres: Server, driver: str, given: str) -> None:
    async def main() -> None:
        async with engine_of(shop, driver) as engine:
            opened = AsyncSession(engine) if given == "session" else engine.connect()
            async with opened:
                with using(opened):
                    await order(opened, 1)
                    shop.ship.enqueue(Order(1))
                pid = (await opened.execute(sqlalchemy.text("SELECT pg_backend_pid()"))).scalar_one()
                postgres.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
                with pytest.raises(EnqueueFailed) as caught:
                    await opened.commit()
                assert caught.value.__cause__ is not None
                await opened.rollback()
                assert shop.both() == ([], [])
                with using(opened):  # on a new connection
                    await order(opened, 2)
                    shop.ship.enqueue(Order(2))
                await opened.commit()
        assert shop.both() == ([2], [2])

    asyncio.run(main())


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


def test_what_cannot_be_waited_for_is_refused(shop: Shop, run: Run) -> None:
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
