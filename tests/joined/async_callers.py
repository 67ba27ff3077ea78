"""Async SQLAlchemy as a caller: sessions and connections on each driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.ext.asyncio import create_async_engine as create_engine

from tests.joined.shop import Shop

AsyncGiven = AsyncSession | AsyncConnection
Scenario = Callable[[AsyncGiven], Awaitable[None]]
Run = Callable[[Scenario], None]
DRIVERS = ("aiosqlite", "asyncpg", "psycopg")


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
