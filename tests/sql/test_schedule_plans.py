"""What a beat's statements cost beside 20,000 schedules of two owners: rows and pages on PostgreSQL, steps of SQLite's machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

import pytest

from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.postgres import Postgres
from dbqueue.database.sqlite import Sqlite
from dbqueue.database.tables import Move
from tests.factory import new_job, now, opened
from tests.servers import Server
from tests.sql import scheduler
from tests.sql.broker import Statement
from tests.sql.filled import Filled
from tests.sql.filled import analysed as analysed
from tests.sql.filled import filled_databases as filled_databases
from tests.sql.plans import explain
from tests.sql.scheduler import LIMIT, SCHEDULES, UNPLANNED, VERBS, statements_of

pytestmark = pytest.mark.req("D16")

PKEY, NEXT, NEW = "schedules_pkey", "schedules_next", "schedules_unplanned"
DUE = SCHEDULES - UNPLANNED

OF_BEATS = ("schedule_due", "schedule_unplanned")
"""Only a beat's own session sends these, which has the plans of a worker's."""

# The indexes that a statement needs, and how many rows and pages it may touch.
COSTS = {
    "schedule_look": ({NEXT, NEW}, 4, 20),
    "schedule_due": ({NEXT}, LIMIT, 4 * LIMIT + 50),
    "schedule_unplanned": ({NEW}, UNPLANNED, 4 * UNPLANNED + 50),
    "schedule_get": ({PKEY}, 1, 10),
    "schedule_put": ({PKEY}, 1, 30),
    "schedule_pause": ({PKEY}, 1, 30),
    "schedule_remove": ({PKEY}, 1, 20),
}


@pytest.fixture
def big(analysed: bool, postgres: Server, filled_databases: dict[str, Filled]) -> Database:
    name = str(analysed)
    if name not in filled_databases:
        context = opened(postgres.dsn(postgres.create_database()))
        database = context.__enter__()
        with database.session() as session:
            session.execute("ALTER TABLE dbqueue_schedules SET (autovacuum_enabled = off)")
            scheduler.fill(database, session, DUE)
            if analysed:
                session.execute("VACUUM ANALYZE dbqueue_schedules")
        filled_databases[name] = database, context
    return filled_databases[name][0]


@pytest.fixture
def session(big: Database) -> Iterator[OwnSession]:
    session = big.open_session()
    yield session
    session.close()


MODES = ("worker", "force_generic_plan", "force_custom_plan")


@pytest.mark.databases("postgres")
@pytest.mark.parametrize(
    ("verb", "mode"), [(verb, mode) for verb in COSTS for mode in (MODES[:1] if verb in OF_BEATS else MODES)]
)
def test_a_statement_finds_its_rows(big: Database, session: OwnSession, verb: str, mode: str) -> None:
    indexes, rows, pages = COSTS[verb]
    statement = statements_of(big.dialect, VERBS[verb], now(big))[0]
    plan = explain(session, statement.text, statement.params, mode)
    assert {f"dbqueue_{name}" for name in indexes} <= plan.indexes | plan.arbiters
    assert not plan.sequential
    assert plan.rows_read <= rows, plan.root
    assert plan.pages <= pages, plan.root


@pytest.mark.databases("postgres")
def test_writing_a_batch_and_moving_its_cursors_touch_their_own_rows(big: Database, session: OwnSession) -> None:
    dialect = big.dialect
    assert isinstance(dialect, Postgres)
    at = int(session.execute("SELECT last_slot FROM dbqueue_schedules LIMIT 1")[0][0])
    moves = [Move("", f"s{n}", at, at + 1, at + 2, 1) for n in range(LIMIT)]
    sent: list[Statement] = []

    class Hears:
        changed = LIMIT

        def execute(self, text: str, params: dict[str, object]) -> list[tuple[bytes]]:
            sent.append(Statement(text, params))
            return []

    dialect.move_cursors(Hears(), moves)  # type: ignore[arg-type]
    dialect.insert_due(Hears(), [new_job(queue="q", source="s", sequence=n) for n in range(LIMIT)])  # type: ignore[arg-type]
    cursors, jobs = sent
    plan = explain(session, cursors.text, cursors.params, "worker")
    assert not plan.sequential
    assert "dbqueue_schedules_pkey" in plan.indexes
    assert plan.rows_read <= 3 * LIMIT, plan.root
    plan = explain(session, jobs.text, jobs.params, "worker")
    assert not plan.sequential
    assert plan.rows_read <= LIMIT + 1, plan.root


@pytest.mark.databases("postgres")
def test_an_idle_beat_reads_as_little_after_ten_thousand_firings(postgres: Server) -> None:
    """Each one leaves a dead entry in the index; the look must not read them all again."""
    with opened(postgres.dsn(postgres.create_database())) as database, database.session() as session:
        session.execute("ALTER TABLE dbqueue_schedules SET (autovacuum_enabled = off)")
        scheduler.fill(database, session, 0)
        statement = statements_of(database.dialect, VERBS["schedule_look"])[0]
        session.execute("UPDATE dbqueue_schedules SET planned = spec || ' ' || timezone WHERE planned IS NULL")
        for _ in range(3):
            session.execute("UPDATE dbqueue_schedules SET next_at = next_at + 60000000")
        explain(session, statement.text, statement.params)  # whoever comes first marks what is dead
        plan = explain(session, statement.text, statement.params)
        assert plan.pages <= 400, plan.root
        assert plan.rows_read <= 4, plan.root


def test_every_index_of_the_schedules_is_used_by_a_statement() -> None:
    """The migration has none that no plan needs: each is kept up by every write."""
    script = (files("dbqueue.database") / "migrations" / "postgres" / "0003_schedules.sql").read_text()
    assert set(re.findall(r"CREATE INDEX \{prefix\}(\w+)", script)) == {NEXT, NEW}


# -- SQLite ------------------------------------------------------------------------------------------------------------

STEPS = {
    "schedule_look": 200,
    "schedule_due": 60 * LIMIT,
    "schedule_unplanned": 100 * UNPLANNED + 200,
    "schedule_get": 100,
    "schedule_put": 300,
    "schedule_pause": 200,
    "schedule_remove": 200,
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with opened(f"sqlite:///{tmp_path_factory.mktemp('plans') / 'big.db'}") as database:
        with database.transaction() as session:
            scheduler.fill(database, session, DUE)
        yield database


@contextmanager
def counted(session: OwnSession) -> Iterator[list[int]]:
    """Steps of SQLite's machine; what was done is undone."""
    steps = [0]

    def count() -> int:
        steps[0] += 10
        return 0

    session.begin()
    session.connection.set_progress_handler(count, 10)
    try:
        yield steps
    finally:
        session.connection.set_progress_handler(None, 0)
        session.rollback()


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("verb", STEPS)
@pytest.mark.parametrize("state", ["never analysed", "analysed"])
def test_the_work_does_not_grow(filled: Database, verb: str, state: str) -> None:
    with filled.session() as session:
        if state == "analysed":
            session.execute("ANALYZE")
        for statement in statements_of(filled.dialect, VERBS[verb], now(filled)):
            rows = session.execute(f"EXPLAIN QUERY PLAN {statement.text}", statement.params)
            plan = [str(row[3]) for row in rows]
            for line in plan:
                if re.search(r"dbqueue_|\bs\b", line):
                    assert re.match(r"SEARCH \w+ USING (COVERING )?INDEX", line), plan
            assert not any("TEMP B-TREE" in line for line in plan), plan
            with counted(session) as steps:
                session.execute(statement.text, statement.params)
            assert steps[0] <= STEPS[verb], plan


@pytest.mark.databases("sqlite")
def test_moving_a_cursor_is_one_search(filled: Database) -> None:
    assert isinstance(filled.dialect, Sqlite)
    with filled.session() as session, counted(session) as steps:
        at = int(session.execute("SELECT last_slot FROM dbqueue_schedules LIMIT 1")[0][0])
        assert filled.dialect.move_cursors(session, [Move("", f"s{n}", at, at + 1, at + 2, 1) for n in range(10)]) == 10
    assert steps[0] <= 1_500
