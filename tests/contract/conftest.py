"""One database of each kind for all contract tests, emptied before each: they need no fresh schema, and are many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dbqueue.database.engine import Database
from dbqueue.errors import ConnectionLost
from tests.factory import clear
from tests.factory import session as session


@pytest.fixture(scope="session")
def _kept() -> Iterator[dict[str, Database]]:
    kept: dict[str, Database] = {}
    yield kept
    for database in kept.values():
        database.close()


@pytest.fixture
def db(
    database: str, _kept: dict[str, Database], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Database:
    if database != "sqlite":
        server = request.getfixturevalue("postgres")  # running again, if a test stopped it
    if database not in _kept:
        path: Path = tmp_path_factory.mktemp("contract") / "queue.db"
        _kept[database] = Database(
            f"sqlite:///{path}" if database == "sqlite" else server.dsn(server.create_database())
        )
        _kept[database].ready()
    try:
        clear(_kept[database])
    except ConnectionLost:
        clear(_kept[database])
    return _kept[database]
