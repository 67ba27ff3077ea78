"""What the plan tests on PostgreSQL share: databases that are filled once for a module, with statistics and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from dbqueue.database.dialect import OwnSession
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


def fill_one_queue(session: OwnSession, count: int) -> None:
    """Claimable jobs of the queue ``default``, of which the planner knows nothing."""
    session.execute("ALTER TABLE dbqueue_jobs SET (autovacuum_enabled = off)")
    session.execute(
        "INSERT INTO dbqueue_jobs (id, target, queue, priority, payload, state, run_at, ready_at, max_attempts, created_at, updated_at)"
        f" SELECT gen_random_uuid(), 't', 'default', 9, '{{}}', 0, 0, g, 3, 0, 0 FROM generate_series(1, {count}) g"
    )
