"""What the transport's statements cost on PostgreSQL beside 100,000 messages, 100,000 letters and 5,000 queues with their consumers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import cast

import pytest

from dbqueue import routing
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.mail import BATCH, PRUNED
from tests.factory import opened
from tests.servers import Server
from tests.sql import broker
from tests.sql.broker import (
    ALL_VERBS,
    EVENTS,
    FOLLOWERS,
    LETTERS,
    LIMIT,
    VERBS,
    Overheard,
    Statement,
    Verb,
    statements_of,
)
from tests.sql.filled import Filled, fill_one_queue
from tests.sql.filled import analysed as analysed
from tests.sql.filled import filled_databases as filled_databases
from tests.sql.plans import Plan, explain

pytestmark = [pytest.mark.databases("postgres"), pytest.mark.req("D11", "C1")]

LARGE = {f"dbqueue_{name}" for name in ("jobs", "finished", "mail", "results", "groups", "chords")}
"""Tables that nothing may read whole, unless it has to."""
MODES = ("force_generic_plan", "force_custom_plan")


@pytest.fixture
def big(analysed: bool, postgres: Server, filled_databases: dict[str, Filled]) -> Database:
    """Filled once for the module; statements are explained in transactions that are rolled back."""
    if str(analysed) not in filled_databases:
        context = opened(postgres.dsn(postgres.create_database()))
        database = context.__enter__()
        with database.session() as session:
            for table in (
                "jobs",
                "mail",
                "cursors",
                "queues",
                "bindings",
                "consumers",
                "exchanges",
                "revoked",
                "results",
                "groups",
                "chords",
            ):
                session.execute(f"ALTER TABLE dbqueue_{table} SET (autovacuum_enabled = off)")
            broker.fill(database, session, session)
            if analysed:
                session.execute("VACUUM ANALYZE")
        filled_databases[str(analysed)] = database, context
    return filled_databases[str(analysed)][0]


@pytest.fixture
def session(big: Database) -> Iterator[OwnSession]:
    own = big.open_session()
    yield own
    own.close()


def plans(session: OwnSession, statements: list[Statement]) -> list[Plan]:
    """Each with its values and without: a pooled connection gets the one first and then perhaps the other."""
    return [explain(session, s.text, s.params, mode) for s in statements for mode in MODES]


# Rows and pages that each statement of a verb may touch at most, and the indexes that they need together. A table of queues or
# consumers that was never analysed may be read whole: it is small.
COSTS = {
    "find_exchange": ({"exchanges_pkey"}, 1, 10),
    "declare_exchange": ({"exchanges_pkey"}, 0, 20),
    "find_queue": ({"queues_pkey"}, 1, 10),
    "declare_queue": ({"queues_pkey"}, 0, 20),
    "touch_queue": ({"queues_pkey"}, 1, 25),
    "ready": ({"jobs_claim"}, LIMIT, 2 * LIMIT + 20),
    "bind": ({"bindings_pkey"}, 0, 25),
    "unbind": (set(), 4, 20),
    "is_bound": ({"bindings_pkey"}, 1, 10),
    "bindings_of": ({"bindings_queue"}, 20, 40),
    "routes": ({"bindings_pkey"}, 4 * FOLLOWERS, 8 * FOLLOWERS),
    "add_consumer": ({"consumers_pkey", "queues_pkey"}, 1, 25),
    "remove_consumer": ({"consumers_pkey", "consumers_queue", "queues_pkey"}, 3, 25),
    "consumer_count": ({"consumers_queue"}, 4, 10),
    "expired_messages": ({"jobs_expires"}, 0, 10),
    "store_result": ({"results_pkey"}, 0, 40),
    "load_result": ({"results_pkey"}, 1, 10),
    "load_results": ({"results_pkey"}, 500, 2_100),
    "describe_result": ({"results_pkey"}, 1, 10),
    "forget_result": ({"results_pkey"}, 1, 15),
    "save_group": ({"groups_pkey"}, 0, 40),
    "load_group": ({"groups_pkey"}, 1, 10),
    "delete_group": ({"groups_pkey"}, 1, 15),
    "prune_results_found": ({"results_pkey"}, 50, 250),
    "prune_results": ({"results_expires", "groups_expires", "chords_expires"}, 60, 100),
    "mail_open": ({"mail_pkey", "cursors_pkey"}, 2, 25),
    "mail_begin": ({"cursors_pkey"}, 0, 20),
    "mail_look": ({"mail_pkey", "cursors_pkey"}, 1_100, 60),
    "mail_move": ({"cursors_pkey"}, 1, 25),
    "mail_drop": ({"cursors_pkey"}, 1, 20),
}
YOUNG = {
    "ready": (100_000, 10_000),
    "routes": (broker.QUEUES + 4 * FOLLOWERS, 8 * FOLLOWERS),
    "bindings_of": (1_020, 60),
    "load_result": (3, 10),
    "load_results": (1_000, 2_100),
    "prune_results_found": (100, 250),
}
"""Before the first ANALYZE, where that differs: the planner takes every range to be short and sorts it."""


@pytest.mark.parametrize("verb", COSTS)
def test_a_statement_finds_its_rows(big: Database, session: OwnSession, analysed: bool, verb: str) -> None:
    indexes, rows, pages = COSTS[verb]
    if not analysed:
        rows, pages = YOUNG.get(verb, (rows, pages))
    found = plans(session, statements_of(big.dialect, ALL_VERBS[verb]))
    for plan in found:
        assert not plan.sequential & LARGE
        assert plan.rows_read <= rows, (plan.rows_read, plan.root)
        assert plan.pages <= pages, (plan.pages, plan.root)
    assert {f"dbqueue_{name}" for name in indexes} <= set().union(*(plan.indexes | plan.arbiters for plan in found))


def test_what_stops_at_its_limit_does_so_without_statistics(big: Database, session: OwnSession) -> None:
    """Before the first ANALYZE, and after one at a time when the queue was empty, the planner would read and sort all that lies there:
    for each declaration of a queue, and for each page of what is looked through for stamps."""
    (ready,) = statements_of(big.dialect, VERBS["ready"])
    plan = explain(session, ready.text, ready.params, "worker")
    assert plan.indexes == {"dbqueue_jobs_claim"}
    assert plan.rows_read <= LIMIT
    (heads,) = statements_of(big.dialect, VERBS["waiting_heads"])
    plan = explain(session, heads.text, heads.params, "worker")
    assert [node["Node Type"] for node in plan.nodes()] == ["Limit", "Index Scan"]
    assert plan.indexes == {"dbqueue_jobs_pkey"}


def test_the_transport_asks_for_such_plans(fresh_db: Database) -> None:
    """On a connection of its own; in a caller's transaction the planner is left alone."""
    question = "SELECT idx_tup_read FROM pg_stat_all_indexes WHERE indexrelname = 'dbqueue_jobs_claim'"

    def read() -> int:
        own.execute("SELECT pg_stat_force_next_flush()")
        return int(own.execute(question)[0][0])

    with fresh_db.session() as own:
        fill_one_queue(own, 20_000)
        before = read()
        assert routing.ready(fresh_db.dialect, own, "default", LIMIT) == LIMIT
        assert read() - before <= 2 * LIMIT


def test_a_prune_of_letters_reads_no_more_than_a_batch(big: Database, session: OwnSession) -> None:
    """The first of the two looks for the end of a batch, of which the second one makes an index range."""
    look, delete = statements_of(big.dialect, VERBS["mail_prune"])
    last = LETTERS // 10
    for plan in plans(session, [Statement(delete.text, {**delete.params, "last": last})]):
        assert plan.indexes == {"dbqueue_mail_pkey"}
        assert plan.rows_read <= 2 * last
    assert f"LIMIT {PRUNED}" in look.text


def test_a_direct_exchange_reads_its_own_bindings(big: Database, session: OwnSession, analysed: bool) -> None:
    for key, found in (("r7", 1), ("nobody's", 0)):
        for plan in plans(session, statements_of(big.dialect, lambda d, s: routing.routes(d, s, "replies", key))):  # noqa: B023
            assert plan.root["Actual Rows"] == found
            assert plan.rows_read <= (4 * FOLLOWERS if analysed else broker.QUEUES + 4 * FOLLOWERS)


def test_the_queue_of_a_reply_goes_without_a_look_at_all_jobs(big: Database, session: OwnSession) -> None:
    """Each client of remote control deletes one. The messages of a later time, which only an ordinary queue can have, are looked for
    among all of them."""
    *short, later = statements_of(big.dialect, VERBS["delete_queue"])
    for plan in plans(session, short):
        assert not plan.sequential
        assert plan.rows_read <= 10
        assert plan.pages <= 30
    assert "ready_at IS NULL" in later.text
    with_purge = [s for s in short if "dbqueue_jobs" in s.text]
    assert len(with_purge) == 1
    assert "dbqueue_jobs_claim" in plans(session, with_purge)[0].indexes


@pytest.mark.parametrize("analysed", [True])
def test_a_reader_that_is_far_behind_reads_one_batch(big: Database, session: OwnSession, analysed: bool) -> None:
    """And not, for each batch, all that is left."""
    statements = statements_of(big.dialect, lambda d, s: Overheard(d, s)._look(cast(OwnSession, s), "q4", EVENTS))
    for plan in plans(session, statements):
        assert plan.rows_read <= BATCH + 20
    at, end, rows = Overheard(big.dialect, session)._look(session, "q4", EVENTS)
    assert (at, end, len(rows)) == (0, LETTERS, BATCH)


def test_every_index_of_the_messages_is_used_by_a_statement(big: Database, session: OwnSession) -> None:
    """The migration has none that no plan needs: each is kept up by every write."""
    script = (files("dbqueue.database") / "migrations" / "postgres" / "0002_messages.sql").read_text()
    made = set(re.findall(r"CREATE INDEX \{prefix\}(\w+)", script))
    tables = re.findall(r"CREATE (?:UNLOGGED )?TABLE \{(\w+)\} \((.*?)\n\)", script, re.DOTALL)
    made |= {f"{table}_pkey" for table, columns in tables if "PRIMARY KEY" in columns}
    assert len(made) == 10
    verbs: list[Verb] = [*VERBS.values(), lambda d, s: routing.revoke(d, s, ["task1"], 1)]
    used: set[str] = set()
    for verb in verbs:
        for statement in statements_of(big.dialect, verb):
            plan = explain(session, statement.text, statement.params)
            used |= plan.indexes | plan.arbiters
    assert {f"dbqueue_{name}" for name in made} <= used
