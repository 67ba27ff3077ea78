"""What the hot statements cost on PostgreSQL with 100,000 claimable jobs beside 70,000 others and a long history.

An index in the plan is not enough, since a badly used one reads everything too: the rows and pages that a statement touched are
counted. Each is tried before the first ANALYZE and after it, planned for its values and generically.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dbqueue.clock import SECOND
from dbqueue.database import postgres_statements
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.postgres import Postgres, PostgresSession
from dbqueue.database.tables import ClaimRequest, Held, Settlement, Turn
from dbqueue.ids import ZERO, new_id, new_token
from dbqueue.states import Kind, State
from tests.factory import LEASE, PAST, claim_turn, make, new_job, now, opened
from tests.servers import Server
from tests.sql.filled import Filled, fill_one_queue
from tests.sql.filled import analysed as analysed
from tests.sql.filled import filled_databases as filled_databases
from tests.sql.plans import Plan, explain

pytestmark = pytest.mark.databases("postgres")

LIMIT = 16
JOBS, KEY, WAITING, LEASES, CLAIM = (f"dbqueue_jobs_{name}" for name in ("pkey", "key", "waiting", "lease", "claim"))
HISTORY, PRUNE = "dbqueue_finished_pkey", "dbqueue_finished_prune"

_FILL = """
INSERT INTO dbqueue_jobs (id, target, key, queue, priority, payload, state, run_at, ready_at, attempt, max_attempts, token, worker,
  lease_until, created_at, updated_at)
SELECT gen_random_uuid(), 'tests.target', CASE WHEN mod(g, 5) = 0 THEN 'key' || g END, 'q' || mod(g, 4), mod(g, 5) * 2, '{}', s.state,
  %(now)s::bigint + CASE WHEN s.waits THEN 1000000000 + g ELSE -g END, CASE WHEN s.ready THEN %(now)s::bigint - g END, s.state, 3,
  CASE WHEN s.state = 1 THEN gen_random_uuid() END, 'w' || mod(g, 10), CASE WHEN s.state = 1 THEN %(now)s::bigint + 600000000 + g END,
  %(now)s::bigint, %(now)s::bigint
FROM generate_series(1, 170000) g, LATERAL (SELECT CASE WHEN g > 100000 AND g <= 120000 THEN 1 ELSE 0 END AS state,
  g > 120000 AS waits, g <= 100000 AS ready) s
"""
_FILL_HISTORY = """
INSERT INTO dbqueue_finished (id, target, queue, priority, payload, state, run_at, attempt, lapses, max_attempts, on_crash, token,
  created_at, finished_at)
SELECT gen_random_uuid(), 'tests.target', 'q' || mod(g, 4), 9, '{}',
  CASE WHEN mod(g, 10) = 0 THEN 6 ELSE 4 END, %(now)s::bigint, 1, 0, 3, 0,
  gen_random_uuid(), %(now)s::bigint, %(now)s::bigint - g FROM generate_series(1, 100000) g
"""


@pytest.fixture
def big(analysed: bool, postgres: Server, filled_databases: dict[str, Filled]) -> Database:
    """Filled once for the module; statements are explained in transactions that are rolled back."""
    name = str(analysed)
    if name not in filled_databases:
        context = opened(postgres.dsn(postgres.create_database()))
        database = context.__enter__()
        with database.session() as session:
            for table in ("jobs", "finished"):
                session.execute(f"ALTER TABLE dbqueue_{table} SET (autovacuum_enabled = off)")
            for statement in (_FILL, _FILL_HISTORY):
                session.execute(statement, {"now": database.dialect.now(session)})
            if analysed:
                session.execute("VACUUM ANALYZE dbqueue_jobs")
                session.execute("VACUUM ANALYZE dbqueue_finished")
        filled_databases[name] = database, context
    return filled_databases[name][0]


@pytest.fixture
def worker(big: Database) -> Iterator[PostgresSession]:
    session = big.open_session()
    assert isinstance(session, PostgresSession)
    yield session
    session.close()


def dialect_of(big: Database) -> Postgres:
    assert isinstance(big.dialect, Postgres)
    return big.dialect


def held(session: OwnSession, count: int = LIMIT) -> list[tuple[bytes, bytes]]:
    return [tuple(row) for row in session.execute(f"SELECT id, token FROM dbqueue_jobs WHERE state = 1 LIMIT {count}")]


def step(big: Database, session: PostgresSession, turn: Turn) -> tuple[str, str, dict[str, Any]]:
    return dialect_of(big)._steps(session, turn)[0]


modes = pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
worker_modes = pytest.mark.parametrize("mode", ["worker", "force_generic_plan", "force_custom_plan"])


def check(plan: Plan, indexes: set[str], rows: int, pages: int) -> None:
    assert not plan.sequential & {"dbqueue_jobs", "dbqueue_finished"}
    assert indexes <= plan.indexes
    assert plan.rows_read <= rows, plan.rows_read
    assert plan.pages <= pages, plan.pages


@worker_modes
@pytest.mark.req("D11")
def test_claim_by_sweep(big: Database, worker: PostgresSession, mode: str) -> None:
    kind, text, params = step(big, worker, claim_turn(LIMIT, queues=("q2", "q0", "q1")))
    assert kind == "sweep"
    plan = explain(worker, text, params, mode)
    check(plan, {CLAIM, JOBS}, rows=4 * LIMIT, pages=60 * LIMIT)
    assert_lanes_come_in_order(plan)


@worker_modes
@pytest.mark.req("D11")
def test_claim_at_the_marks(big: Database, worker: PostgresSession, mode: str) -> None:
    here = now(big)
    for queue in ("q0", "q1", "q2"):
        for priority in range(0, 10, 2):
            worker.marks.lanes[queue, priority] = (here - 50_000, ZERO)
    worker.marks._next["claim"] = float("inf")
    kind, text, params = step(big, worker, claim_turn(LIMIT, queues=("q2", "q0", "q1")))
    assert kind == "marked"
    plan = explain(worker, text, params, mode)
    check(plan, {CLAIM, JOBS}, rows=4 * LIMIT, pages=60 * LIMIT)
    assert_lanes_come_in_order(plan)


@pytest.mark.parametrize("limit", [1, 96])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.req("D11")
def test_claims_of_one_and_of_many(big: Database, worker: PostgresSession, limit: int, marked: bool) -> None:
    """The larger the claim, the more the planner is tempted to read and sort the whole backlog."""
    if marked:
        worker.marks.lanes["q0", 0] = worker.marks.lanes["q0", 2] = (1, ZERO)
        worker.marks._next["claim"] = float("inf")
    kind, text, params = step(big, worker, claim_turn(limit, queues=("q0", "q1")))
    assert kind == ("marked" if marked else "sweep")
    plan = explain(worker, text, params, "worker")
    check(plan, {CLAIM, JOBS}, rows=4 * limit + 1, pages=60 * limit + 20)
    assert_lanes_come_in_order(plan)


def assert_lanes_come_in_order(plan: Plan) -> None:
    """Best lanes first rests on this: the outer side of a nested loop is the list of lanes, and LIMIT stops it."""
    picked = next(node for node in plan.nodes() if node.get("Subplan Name") == "CTE picked")
    assert picked["Node Type"] == "Limit"
    loop = picked["Plans"][0]
    assert loop["Node Type"] == "Nested Loop"
    assert loop["Plans"][0]["Node Type"] == "Function Scan"


@worker_modes
@pytest.mark.req("D11")
def test_claim_of_nothing(big: Database, worker: PostgresSession, mode: str) -> None:
    _, text, params = step(big, worker, claim_turn(LIMIT, queues=("empty", "none")))
    check(explain(worker, text, params, mode), {CLAIM}, rows=0, pages=40)


@worker_modes
@pytest.mark.req("D11")
def test_settle_fast(big: Database, worker: PostgresSession, mode: str) -> None:
    batch = [Settlement(job_id, token, State.SUCCEEDED, "q") for job_id, token in held(worker)]
    kind, text, params = step(big, worker, Turn(batch))
    assert kind == "fast"
    check(explain(worker, text, params, mode), {JOBS}, rows=4 * LIMIT, pages=60 * LIMIT)


@worker_modes
@pytest.mark.req("D11")
def test_settle(big: Database, worker: PostgresSession, mode: str) -> None:
    states = [
        (State.SUCCEEDED, None),
        (State.PENDING, Kind.FAILED),
        (State.BLOCKED, Kind.UNKNOWN_TARGET),
        (State.DEAD, Kind.FAILED),
    ]
    batch = [
        Settlement(job_id, token, *states[n % 4][:1], "q", states[n % 4][1])
        for n, (job_id, token) in enumerate(held(worker))
    ]
    kind, text, params = step(big, worker, Turn(batch))
    assert kind == "settle"
    check(explain(worker, text, params, mode), {JOBS}, rows=8 * LIMIT, pages=80 * LIMIT)


@modes
@pytest.mark.req("D13")
def test_already(big: Database, worker: PostgresSession, mode: str) -> None:
    text = big.dialect.names.fill(postgres_statements.ALREADY)
    found = worker.execute(f"SELECT id FROM dbqueue_finished LIMIT {LIMIT}")
    params = {"ids": [row[0].hex() for row in found] + [new_id().hex()]}
    check(explain(worker, text, params, mode), {HISTORY}, rows=3 * LIMIT, pages=12 * LIMIT)


@worker_modes
@pytest.mark.req("D14")
def test_renew(big: Database, worker: PostgresSession, mode: str) -> None:
    kind, text, params = step(big, worker, Turn(renewals=[Held(*pair) for pair in held(worker)], lease=LEASE))
    assert kind == "renew"
    check(explain(worker, text, params, mode), {JOBS}, rows=10 * LIMIT, pages=60 * LIMIT)


def upkeep_params(big: Database, **more: Any) -> dict[str, Any]:
    return {"offset": big.clock.offset, "salt": big.dialect.names.salt, "mark": 0} | more


@worker_modes
@pytest.mark.parametrize("late", [0, 1_000.03])
@pytest.mark.req("D11", "H14")
def test_promote(big: Database, worker: PostgresSession, mode: str, late: float) -> None:
    """With nothing due it reads one row, the next to come; with much due it stops at the limit."""
    text = dialect_of(big)._text(postgres_statements.PROMOTE, LIMIT)
    params = upkeep_params(big, offset=round(late * SECOND) + (PAST if late else 0))
    check(
        explain(worker, text, params, mode), {WAITING}, rows=5 * LIMIT if late else 3, pages=60 * LIMIT if late else 30
    )


@worker_modes
@pytest.mark.parametrize("late", [0, 700])
@pytest.mark.req("D12", "H14")
def test_expire(big: Database, worker: PostgresSession, mode: str, late: int) -> None:
    text = dialect_of(big)._text(postgres_statements.EXPIRE, LIMIT)
    params = upkeep_params(big, offset=late * SECOND)
    check(explain(worker, text, params, mode), {LEASES}, rows=5 * LIMIT, pages=80 * LIMIT if late else 30)


@modes
@pytest.mark.req("D8")
def test_the_holder_of_a_key(big: Database, worker: PostgresSession, mode: str) -> None:
    text, dialect = dialect_of(big)._enqueue, dialect_of(big)
    for key in ("key5", "fresh", None):
        params = dialect._new(new_job()) | {
            "id": new_id().hex(), "task_id": None, "payload": b"{}", "key": key, "soon": 250_000,
        }  # fmt: skip
        used = {JOBS} if key is None else {JOBS, KEY}
        check(explain(worker, text, params, mode), used, rows=2, pages=60)


@modes
@pytest.mark.req("D5")
def test_a_job_without_a_key_in_a_callers_transaction(big: Database, worker: PostgresSession, mode: str) -> None:
    """Nothing is read, and there is next to nothing to plan: each call pays for that."""
    dialect = dialect_of(big)
    params = dialect._new(new_job()) | {"id": new_id().hex(), "task_id": None, "payload": b"{}", "soon": 250_000}
    explain(worker, dialect._enqueue_plain, params, mode)  # the first one in a session reads catalogs
    plan = explain(worker, dialect._enqueue_plain, params, mode)
    check(plan, set(), rows=0, pages=60)
    assert [node["Node Type"] for node in plan.nodes()] == ["ModifyTable", "Subquery Scan", "Result"]


@modes
@pytest.mark.req("D8")
def test_the_holders_of_many_keys(big: Database, worker: PostgresSession, mode: str) -> None:
    keys = [*(f"key{5 * n}" for n in range(1, LIMIT)), *(f"new{n}" for n in range(LIMIT)), *[None] * LIMIT]
    params = dialect_of(big)._new(new_job()) | {
        "ids": [new_id().hex() for _ in keys], "keys": keys, "payloads": [b"{}"] * len(keys),
    }  # fmt: skip
    check(explain(worker, dialect_of(big)._enqueue_many, params, mode), set(), rows=8 * LIMIT, pages=200 * LIMIT)


@modes
@pytest.mark.req("D11")
def test_release_unknown(big: Database, worker: PostgresSession, mode: str) -> None:
    """Once after a lost connection: it may read the running jobs, and nothing else."""
    text = big.dialect.names.fill(postgres_statements.RELEASE_UNKNOWN)
    params = {"offset": 0, "worker": "nobody", "ids": [new_id().hex()], "tokens": [new_token().hex()]}
    plan = explain(worker, text, params, mode)
    assert not plan.sequential
    assert LEASES in plan.indexes
    assert plan.rows_read <= 2 * 20_000


@modes
def test_probe(big: Database, worker: PostgresSession, mode: str) -> None:
    text = big.dialect.names.fill(postgres_statements.PROBE)
    check(explain(worker, text, {"queues": ["none", "q1"]}, mode), {CLAIM}, rows=2, pages=30)


@modes
def test_prune(big: Database, worker: PostgresSession, mode: str) -> None:
    text = dialect_of(big)._text(postgres_statements.PRUNE, LIMIT)
    for state, before in ((4, now(big)), (6, now(big)), (7, now(big)), (4, 0)):
        plan = explain(worker, text, {"state": state, "before": before}, mode)
        check(plan, {PRUNE}, rows=4 * LIMIT, pages=30 * LIMIT)


# -- the rule of D13, in the plan --------------------------------------------------------------------------------------


@modes
@pytest.mark.req("D13")
def test_the_clock_stands_above_the_locks(big: Database, worker: PostgresSession, mode: str) -> None:
    """The planner must not push a test of the clock below the node that locks, nor read the clock before the locks are held."""
    pairs = held(worker)
    texts = {
        "fast": step(big, worker, Turn([Settlement(*pair, State.SUCCEEDED, "q") for pair in pairs])),
        "settle": step(big, worker, Turn([Settlement(*pair, State.ACKED, "q") for pair in pairs])),
        "renew": step(big, worker, Turn(renewals=[Held(*pair) for pair in pairs], lease=LEASE)),
        "claim": step(big, worker, claim_turn(LIMIT, queues=("q1", "q2"))),
    }
    for name, (_, text, params) in texts.items():
        plan = explain(worker, text, params, mode)
        locking = next(node for node in plan.nodes() if node.get("Subplan Name") in ("CTE locked", "CTE picked"))
        below = list(plan.nodes(locking))
        assert any(node["Node Type"] == "LockRows" for node in below), name
        assert not any(
            "clock_timestamp" in str(value) for node in below for key, value in node.items() if key != "Plans"
        ), name
        clock = next(node for node in plan.nodes() if node.get("Subplan Name") == "CTE clock")
        assert clock["Node Type"] == "Aggregate", name
        assert [node["CTE Name"] for node in plan.nodes(clock) if "CTE Name" in node] == [
            locking["Subplan Name"][4:]
        ], name
        reading = [n for n in plan.nodes() if any("clock_timestamp" in str(v) for k, v in n.items() if k != "Plans")]
        assert reading == [clock], name


# -- what workers get --------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
def test_the_turns_statements_reach_generic_plans(db: Database, session: PostgresSession) -> None:
    """A parameter in LIMIT would make the generic plan look dear, and each execution would be planned anew."""
    dialect = db.dialect
    for n in range(12):
        made = [make(db) for _ in range(2)]
        if n % 2:
            session.marks.swept("claim", 0)
        else:
            session.marks._next.clear()
        claimed = dialect.turn(session, claim_turn(2)).claimed
        assert len(claimed) == len(made)
        dialect.turn(session, Turn(renewals=[Held(r.id, r.token) for r in claimed], lease=LEASE))
        states = (State.SUCCEEDED, State.SUCCEEDED if n % 2 else State.ACKED)
        batch = [Settlement(r.id, r.token, state, r.queue) for r, state in zip(claimed, states, strict=True)]
        dialect.turn(session, Turn(batch))
    for _ in range(12):
        dialect.turn(session, Turn([Settlement(new_id(), new_token(), State.SUCCEEDED, "q")]))
        dialect.turn(session, Turn([Settlement(new_id(), new_token(), State.ACKED, "q")]))
        dialect.turn(session, claim_turn(2))
        session.marks._next.clear()
        dialect.turn(session, claim_turn(2))
    question = "SELECT left(statement, 40), generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE '%WITH%'"
    turns = [(text, generic, custom) for text, generic, custom in session.execute(question) if generic + custom >= 10]
    assert len(turns) == 5
    assert all(generic > 0 and custom <= 5 for _, generic, custom in turns), turns


@pytest.mark.req("D11")
def test_a_large_claim_from_a_young_backlog(fresh_db: Database) -> None:
    """Before its first ANALYZE a table of this size is where the planner would rather read and sort all of it."""
    with fresh_db.session() as session:
        assert isinstance(session, PostgresSession)
        fill_one_queue(session, 20_000)
        _, text, params = step(fresh_db, session, claim_turn(96))
        check(explain(session, text, params, "worker"), {CLAIM, JOBS}, rows=4 * 96 + 1, pages=60 * 96)


@pytest.mark.req("D11")
def test_marks_spare_a_worker_what_a_pinned_snapshot_keeps(fresh_db: Database) -> None:
    """While somebody holds a snapshot, every job done since stays in the indexes; the marks lead past them."""
    dialect = fresh_db.dialect
    assert isinstance(dialect, Postgres)
    pinned, own = fresh_db.open_session(), fresh_db.open_session()
    assert isinstance(own, PostgresSession)
    pinned.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    fill_one_queue(own, 12_000)
    done = dialect.turn(own, claim_turn(8192)).claimed
    dialect.turn(own, Turn([Settlement(r.id, r.token, State.SUCCEEDED, r.queue) for r in done]))
    costs = {}
    for name, due in (("sweep", True), ("marked", False)):
        own.marks._next["claim"] = 0.0 if due else float("inf")
        kind, text, params = dialect._claim_step(own.marks, ClaimRequest(("default",), 4, "w", new_token(), LEASE))
        assert kind == name
        with fresh_db.session() as looking:
            costs[name] = explain(looking, text, params).pages
    assert costs["marked"] < 200 < costs["sweep"]
    for session in (pinned, own):
        session.close()
