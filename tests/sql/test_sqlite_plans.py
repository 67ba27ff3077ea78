"""Every statement of the SQLite dialect finds its rows by an index, and the hot ones do no more work on 100,000 jobs than on few.

EXPLAIN QUERY PLAN names the index; a progress handler counts the steps of SQLite's machine, since a badly used index is named, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from dbqueue.database import sqlite
from dbqueue.database.engine import Database
from dbqueue.ids import new_id, new_token
from tests.factory import now, opened

pytestmark = pytest.mark.databases("sqlite")

STATEMENTS = {
    name: text
    for name, text in vars(sqlite).items()
    if isinstance(text, str) and name.isupper() and not name.startswith("_") and re.search(r"\{(jobs|finished)\}", text)
}
LIMIT = 16

_FILL = """
WITH RECURSIVE g(g) AS (SELECT 1 UNION ALL SELECT g + 1 FROM g WHERE g < 170000)
INSERT INTO dbqueue_jobs (id, target, key, queue, priority, payload, state, run_at, ready_at, attempt, max_attempts, token, worker,
  lease_until, created_at, updated_at)
SELECT randomblob(16), 'tests.target', CASE WHEN g % 5 = 0 THEN 'key' || g END, 'q' || g % 4, g % 5 * 2, '{}',
  g > 100000 AND g <= 120000, :now + CASE WHEN g > 120000 THEN 1000000000 + g ELSE -g END, CASE WHEN g <= 100000 THEN :now - g END,
  0, 3, CASE WHEN g > 100000 AND g <= 120000 THEN randomblob(16) END, 'w' || g % 10,
  CASE WHEN g > 100000 AND g <= 120000 THEN :now + 600000000 + g END, :now, :now FROM g
"""
_FILL_HISTORY = """
WITH RECURSIVE g(g) AS (SELECT 1 UNION ALL SELECT g + 1 FROM g WHERE g < 100000)
INSERT INTO dbqueue_finished (id, target, queue, priority, payload, state, run_at, attempt, lapses, max_attempts, on_crash, token,
  created_at, finished_at)
SELECT randomblob(16), 'tests.target', 'q' || g % 4, 9, '{}', CASE WHEN g % 10 = 0 THEN 6 ELSE 4 END, :now, 1, 0, 3, 0, randomblob(16),
  :now, :now - g FROM g
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with opened(f"sqlite:///{tmp_path_factory.mktemp('plans') / 'big.db'}") as database:
        with database.transaction() as session:
            here = {"now": now(database)}
            session.execute(_FILL, here)
            session.execute(_FILL_HISTORY, here)
        yield database


@pytest.fixture(params=["never analysed", "analysed"])
def big(filled: Database, request: pytest.FixtureRequest) -> Database:
    with filled.session() as session:
        if request.param == "analysed":
            session.execute("ANALYZE")
        elif session.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'"):
            session.execute("DELETE FROM sqlite_stat1")
            session.execute("ANALYZE sqlite_master")  # reads the statistics, of which there are none, again
    return filled


def values(database: Database) -> dict[str, Any]:
    """Something for every parameter of every statement."""
    names = {name for text in STATEMENTS.values() for name in re.findall(r":(\w+)", text)}
    known = {
        "id": new_id(), "token": new_token(), "now": now(database), "limit": LIMIT, "queue": "q1", "target": "tests.target",
        "key": "key5", "before": now(database), "state": 4, "worker": "w1",
    }  # fmt: skip
    return dict.fromkeys(names, 0) | known


@pytest.mark.req("D11")
@pytest.mark.parametrize("name", STATEMENTS)
def test_every_statement_searches_by_an_index(big: Database, name: str) -> None:
    with big.session() as session:
        text = big.dialect.names.fill(STATEMENTS[name])
        given = {key: value for key, value in values(big).items() if f":{key}" in text}
        plan = [row[3] for row in session.execute(f"EXPLAIN QUERY PLAN {text}", given)]
    tables = [line for line in plan if re.search(r"dbqueue_|\bk\b", line)]
    assert tables or name == "ENQUEUE", plan
    for line in tables:
        assert re.match(r"SEARCH \w+ USING (COVERING )?INDEX|SEARCH \w+ USING INTEGER PRIMARY KEY", line), plan
    if name in ("CLAIM_LOOK", "EXPIRED", "PROMOTE", "PRUNE", "PROBE"):
        assert not any("TEMP B-TREE" in line for line in plan), plan


@pytest.mark.req("D11", "H14")
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("CLAIM_LOOK", 200 * LIMIT),
        ("PROBE", 50),
        ("ANY_DUE", 300),
        ("PROMOTE", 300),
        ("EXPIRED", 100),
        ("KEY_HOLDER", 200),
        ("PRUNE", 400 * LIMIT),
        ("ALREADY", 200),
        ("RENEW", 100),
        ("SPARE_OWN", 100),
        ("FINISH", 100),
        ("ENQUEUE", 400),
    ],
)
def test_the_work_of_hot_statements_does_not_grow(big: Database, name: str, most: int) -> None:
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 10
        return 0

    with big.session() as session:
        text = big.dialect.names.fill(STATEMENTS[name])
        given = {key: value for key, value in values(big).items() if f":{key}" in text} | {
            "max_attempts": 1,
            "payload": b"{}",
        }
        given["database_id"] = None
        session.begin()
        session.connection.set_progress_handler(count, 10)
        try:
            session.execute(text, given)
        finally:
            session.connection.set_progress_handler(None, 0)
            session.rollback()
    assert steps <= most
