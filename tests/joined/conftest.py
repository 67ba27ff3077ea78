"""A shop of the test's own, and a caller of each kind that exists on its database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.joined.async_callers import DRIVERS, Run, Scenario, opened
from tests.joined.callers import KINDS, Caller, Kind
from tests.joined.shop import Shop


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any(mark.args[0] == "kind" for mark in metafunc.definition.iter_markers("parametrize"))
    if "kind" in metafunc.fixturenames and not chosen:
        metafunc.parametrize("kind", KINDS, ids=str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kind of caller is not tried on databases where it does not exist."""
    items[:] = [item for item in items if _exists(item)]


def _exists(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    # The hook is given every test of the session, not only those of this folder.
    if callspec is None or "database" not in callspec.params or item.path.parent != Path(__file__).parent:
        return True
    database, kind, driver = (callspec.params.get(name) for name in ("database", "kind", "driver"))
    if kind is not None:
        return database in kind.databases
    return driver is None or (driver == "aiosqlite") == (database == "sqlite")


@pytest.fixture(scope="session")
def _kept() -> Iterator[dict[str, Shop]]:
    kept: dict[str, Shop] = {}
    yield kept
    for shop in kept.values():
        shop.close()


@pytest.fixture
def shop(
    database: str, _kept: dict[str, Shop], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Shop:
    """One of each kind of database for all tests, emptied before each: they are many, and need no fresh schema."""
    if database != "sqlite":
        server = request.getfixturevalue("postgres")  # running again, if a test stopped it
    if database not in _kept:
        path = tmp_path_factory.mktemp("joined") / "shop.db"
        _kept[database] = Shop(f"sqlite:///{path}" if database == "sqlite" else server.dsn(server.create_database()))
    _kept[database].clear()
    return _kept[database]


@pytest.fixture
def make_shop(make_database_url: Callable[[], str]) -> Iterator[Callable[..., Shop]]:
    """Another shop in another database of the same kind."""
    made: list[Shop] = []

    def make(**options: object) -> Shop:
        made.append(Shop(make_database_url(), **options))
        return made[-1]

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def caller(shop: Shop, kind: Kind) -> Iterator[Caller]:
    caller = kind.open(shop)
    yield caller
    caller.close()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    """Of async SQLAlchemy."""
    return str(request.param)


@pytest.fixture(params=["session", "connection"])
def run(request: pytest.FixtureRequest, shop: Shop, driver: str) -> Run:
    """Runs a scenario with a fresh session or connection in an event loop of its own."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with opened(shop, driver, request.param) as given:
                await scenario(given)

        asyncio.run(main())

    return run
