"""`dbqueue queues` for monitors and autoscalers: one queue, one number, and what it costs. (Its table is in
test_cli_jobs.)"""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from dbqueue import DBQueue, views
from dbqueue.cli.queues import METRICS
from dbqueue.clock import SECOND
from dbqueue.states import State
from tests.doors.conftest import ROOT, Run
from tests.factory import make, now

ROWS = 20_000


@pytest.fixture
def filled(queue: DBQueue) -> DBQueue:
    """mail: 2 ready (one of them not promoted yet), 1 waiting, 3 running, 1 blocked; other: 1 ready."""
    database = queue.database
    instant = now(database)
    make(database, queue="mail", run_at=instant - 90 * SECOND, ready_at=instant - 30 * SECOND)
    make(database, queue="mail", run_at=instant - 50 * SECOND, ready_at=None)
    make(database, queue="mail", run_at=instant + 3600 * SECOND)
    for _ in range(3):
        make(database, State.RUNNING, queue="mail")
    make(database, State.BLOCKED, queue="mail")
    make(database, queue="other", run_at=instant - 7200 * SECOND, ready_at=instant - 7200 * SECOND)
    return queue


EXPECTED = {"ready": 2, "waiting": 1, "running": 3, "blocked": 1, "unknown": 0, "backlog": 5}


@pytest.mark.parametrize("metric", METRICS)
def test_one_number(cli: Run, database_url: str, filled: DBQueue, metric: str) -> None:
    def number(*words: str) -> float:
        code, out, err = cli("queues", "--url", database_url, "--metric", metric, *words)
        assert (code, err) == (0, "")
        assert re.fullmatch(r"\d+\n" if metric != "oldest_age" else r"\d+\.\d{3}\n", out)
        return float(out)

    if metric == "oldest_age":
        assert 50 <= number("--queue", "mail") < 60
        assert 7200 <= number() < 7210
    else:
        assert number("--queue", "mail") == EXPECTED[metric]
        assert number() == EXPECTED[metric] + (metric in ("ready", "backlog"))
    assert number("--queue", "nobody's") == 0


def test_one_queue(cli: Run, database_url: str, filled: DBQueue) -> None:
    listed = cli("queues", "--url", database_url, "--queue", "mail", "--json").json["queues"]
    assert [{name: depth[name] for name in EXPECTED if name in depth} for depth in listed] == [
        {name: number for name, number in EXPECTED.items() if name != "backlog"}
    ]
    assert cli("queues", "--url", database_url, "--queue", "nobody's", "--json").json == {
        "queues": [
            {
                "queue": "nobody's",
                "ready": 0,
                "waiting": 0,
                "running": 0,
                "blocked": 0,
                "unknown": 0,
                "oldest_age": None,
            }
        ]
    }
    assert "mail" in cli("queues", "--url", database_url, "--queue", "mail").out


def test_a_number_is_no_document(cli: Run, database_url: str, filled: DBQueue) -> None:
    assert cli("queues", "--url", database_url, "--metric", "ready", "--json").code == 2
    assert cli("queues", "--url", database_url, "--metric", "nonsense").code == 2


class Watched:
    """A session that remembers what it was asked."""

    def __init__(self, session: Any) -> None:
        self._session, self.asked, self.changed = session, [], 0

    def execute(self, statement: str, params: Any = None) -> Any:
        self.asked.append((statement, params))
        return self._session.execute(statement, params)


def fill(queue: DBQueue) -> None:
    """Twenty thousand jobs in twenty queues: two thirds ready, one waiting, two of a hundred running."""
    columns = "id, target, payload, queue, priority, state, run_at, ready_at, max_attempts, created_at, updated_at"
    columns += ", token, lease_until"
    if queue.database.dialect.name == "sqlite":
        statement = f"""
            WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})
            INSERT INTO dbqueue_jobs ({columns})
            SELECT randomblob(16), 't', zeroblob(300), 'q' || (i % 20), 9, i % 50 = 0, 253402300799000000 * (i % 3 = 0),
              CASE WHEN i % 50 > 0 AND i % 3 > 0 THEN 1 END, 3, 1, 1,
              CASE WHEN i % 50 = 0 THEN x'00' END, CASE WHEN i % 50 = 0 THEN 1 END
            FROM n"""
    else:
        statement = f"""
            INSERT INTO dbqueue_jobs ({columns})
            SELECT gen_random_uuid(), 't', decode(repeat('00', 300), 'hex'), 'q' || mod(i, 20), 9,
              (mod(i, 50) = 0)::int,
              253402300799000000 * (mod(i, 3) = 0)::int, CASE WHEN mod(i, 50) > 0 AND mod(i, 3) > 0 THEN 1 END, 3, 1, 1,
              CASE WHEN mod(i, 50) = 0 THEN gen_random_uuid() END, CASE WHEN mod(i, 50) = 0 THEN 1 END
            FROM generate_series(1, {ROWS}) i"""
    with queue.database.transaction() as session:
        session.execute(statement)
    with queue.database.session() as session:
        session.execute("ANALYZE dbqueue_jobs")


def test_the_cost_is_one_pass(queue: DBQueue) -> None:
    """Every row is read, and once: what the help says. (Measured with 100,000 rows.)"""
    fill(queue)
    dialect = queue.database.dialect
    explain = "EXPLAIN QUERY PLAN " if dialect.name == "sqlite" else "EXPLAIN "
    with queue.database.session() as session:
        for name in (None, "q3"):
            watched = Watched(session)
            found = views.depths(dialect, watched, name)
            assert sum(d.ready + d.waiting + d.running for d in found) == (ROWS if name is None else ROWS / 20)
            assert len(watched.asked) == 2, "the clock, and one statement"
            plan = "\n".join(str(row) for row in session.execute(explain + watched.asked[1][0], watched.asked[1][1]))
            assert len(re.findall(r"Scan on dbqueue_jobs|SCAN dbqueue_jobs|SCAN TABLE dbqueue_jobs", plan)) == 1, plan


@pytest.mark.databases("postgres")
def test_the_statement_for_autoscalers_reads_the_indexes(queue: DBQueue, database_url: str) -> None:
    """The one of the documentation counts the same, and touches nothing but the queue's own entries."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    found = re.search(r"```sql\n(SELECT \(SELECT count.*?)```", text, re.DOTALL)
    assert found is not None
    statement = found[1].replace("'mail'", "'q3'")
    fill(queue)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE dbqueue_jobs")
        depth = queue.queues("q3")[0]
        assert connection.execute(statement).fetchone() == (depth.ready + depth.running,)
        plan = "\n".join(row[0] for row in connection.execute("EXPLAIN (ANALYZE, BUFFERS) " + statement))
    assert "Seq Scan" not in plan
    for index in ("dbqueue_jobs_claim", "dbqueue_jobs_waiting", "dbqueue_jobs_lease"):
        assert index in plan
    buffers = re.search(r"Buffers: shared hit=(\d+)", plan)
    assert buffers is not None
    assert int(buffers[1]) < 700, plan
