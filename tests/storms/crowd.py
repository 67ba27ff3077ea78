"""Queues with a million rows, written in SQL; a snapshot that is held over them; and what the database read of them."""

from __future__ import annotations

from typing import Any

from dbqueue.clock import SECOND
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.postgres import Postgres, PostgresSession
from dbqueue.database.tables import ClaimRequest, Turn
from dbqueue.ids import new_token
from dbqueue.targets import Target
from tests.sql.plans import Plan, explain

_POSTGRES = {
    "series": "SELECT g FROM generate_series(0, {n} - 1) AS s(g)",
    # In order, as the product's own ids are: random ones would spread over all pages of the key's index.
    "id": "encode(convert_to('{kind}' || lpad(g::text, 15, '0'), 'UTF8'), 'hex')::uuid",
    "value": "%({})s::bytea",
    "snapshot": "BEGIN ISOLATION LEVEL REPEATABLE READ",
}
_SQLITE = {
    "series": "WITH RECURSIVE s(g) AS (SELECT 0 UNION ALL SELECT g + 1 FROM s WHERE g < {n} - 1) SELECT g FROM s",
    "id": "CAST('{kind}' || printf('%015d', g) AS BLOB)",
    "value": ":{}",
    "snapshot": "BEGIN",
}


def _dialect(database: Database) -> dict[str, str]:
    return _POSTGRES if database.dialect.name == "postgresql" else _SQLITE


def fill_jobs(
    database: Database, target: Target[Any], kind: str, n: int, *, priority: int = 0, first: float = 0, step: float = 0,
    once: object, twice: object = None,
) -> None:  # fmt: skip
    """n pending jobs with the payload ``once``, or every second one with ``twice`` if that is given. ``kind`` is a letter, the
    first of their ids. With ``first`` or ``step`` job number g becomes due after ``first`` + g * ``step`` seconds; without, all are
    claimable."""
    words, schema = _dialect(database), target.schema
    value = words["value"].format
    payload = value("once")
    values = {"fingerprint": schema.fingerprint, "once": schema.encode(once)}
    if twice is not None:
        payload = f"CASE WHEN g & 1 = 0 THEN {value('twice')} ELSE {value('once')} END"
        values["twice"] = schema.encode(twice)
    with database.transaction() as session:
        now = database.dialect.now(session)
        ready = "NULL" if first or step else f"{now} - {n} + g"
        session.execute(
            "INSERT INTO dbqueue_jobs (id, target, fingerprint, payload, queue, priority, state, run_at, ready_at, max_attempts, "
            f"timeout_ms, created_at, updated_at) SELECT {words['id'].format(kind=kind)}, '{target.name}', {value('fingerprint')}, "
            f"{payload}, 'default', {9 - priority}, 0, {now + round(first * 1e6)} + g * {round(step * 1e6)}, {ready}, 5, 30000, "
            f"{now}, {now} FROM ({words['series'].format(n=n)}) AS numbers",
            values,
        )


def copy_message(database: Database, n: int, step: float) -> None:
    """n copies of the one message that is there, with every column as publishing wrote it, but an id and a task id of their own. Each
    is due ``step`` seconds after the one before."""
    same = "target, payload, queue, priority, state, ready_at, max_attempts, on_crash, created_at, updated_at, head, expires_at"
    words = _dialect(database)
    with database.session() as session:
        session.execute("CREATE TEMP TABLE message AS SELECT * FROM dbqueue_jobs")
        assert session.execute("SELECT count(*) FROM message")[0][0] == 1
        session.execute(
            f"INSERT INTO dbqueue_jobs (id, task_id, run_at, {same}) SELECT {words['id'].format(kind='m')}, 'copy-' || g, "
            f"run_at + (g + 1) * {round(step * 1e6)}, {same} FROM message, ({words['series'].format(n=n)}) AS numbers"
        )
        session.execute("DROP TABLE message")


def fill_history(database: Database, target: Target[Any], n: int) -> None:
    """n finished rows, the newest from now."""
    words = _dialect(database)
    with database.transaction() as session:
        now = database.dialect.now(session)
        session.execute(
            "INSERT INTO dbqueue_finished (id, target, queue, priority, state, run_at, attempt, lapses, max_attempts, on_crash, "
            f"created_at, finished_at) SELECT {words['id'].format(kind='h')}, '{target.name}', 'default', 9, 4, {now}, 1, 0, 5, 0, "
            f"{now}, {now} - {n} + g FROM ({words['series'].format(n=n)}) AS numbers"
        )


def hold_snapshot(database: Database) -> OwnSession:
    """A transaction that sees what is there now; it ends when the session is closed."""
    session = database.open_session()
    session.execute(_dialect(database)["snapshot"])
    session.execute("SELECT count(*) FROM dbqueue_jobs")
    return session


def rows_read(session: OwnSession) -> dict[str, int]:
    """Entries that scans of the jobs' indexes returned so far, dead ones included, and rows of the table. PostgreSQL adds what a
    connection read when that ends, or a second later."""
    found = {
        str(name).removeprefix("dbqueue_jobs_"): int(count)
        for name, count in session.execute(
            "SELECT indexrelname::text, idx_tup_read FROM pg_stat_user_indexes WHERE relname = 'dbqueue_jobs'"
        )
    }
    table = session.execute(
        "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'dbqueue_jobs'"
    )
    return {name: found[name] for name in ("claim", "waiting", "lease")} | {"rows": int(table[0][0])}


def claim_plans(database: Database, limit: int) -> dict[str, Plan]:
    """How PostgreSQL runs a worker's claim now: from the marks that a claim before it left, and from the beginning of the index. The
    claim before it is a real one, with a lease of a second."""
    dialect, plans = database.dialect, {}
    assert isinstance(dialect, Postgres)
    with database.session() as session:
        assert isinstance(session, PostgresSession)
        claim = ClaimRequest(("default",), limit, "tests", new_token(), SECOND)
        assert len(dialect.turn(session, Turn(lease=SECOND, claim=claim)).claimed) == limit
        for kind, at in (("sweep", 0.0), ("marked", float("inf"))):
            session.marks._next["claim"] = at
            name, text, params = dialect._claim_step(session.marks, claim)
            assert name == kind
            plans[kind] = explain(session, text, params, "worker")
    return plans
