"""What the plan tests on PostgreSQL share: databases that are filled once for a module, with statistics and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from dbqueue.database.engine import Database

Filled = tuple[Database, AbstractContextManager[Database]]


@pytest.fixture(scope="module")
def filled_databases() -> Iterator[dict[str, Filled]]:
    filled: dict[str, Filled] = {}
    yield filled
    for _, context in filled.values():
        context.__exit__(None, None, None)


@pytest.fixture(params=["never analysed", "analysed"])
def analysed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "analysed")
