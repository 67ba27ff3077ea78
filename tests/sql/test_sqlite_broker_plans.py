"""What the transport's statements cost on SQLite beside 100,000 messages, 100,000 letters in the side file and 5,000 queues.

EXPLAIN QUERY PLAN names the index; a progress handler counts the steps of SQLite's machine, since a badly used index is named, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import cast

import pytest

from dbqueue import routing
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.mail import BATCH
from tests.factory import opened
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

pytestmark = [pytest.mark.databases("sqlite"), pytest.mark.req("D11", "C1")]


@dataclass(frozen=True)
class Broker:
    """A database, a session on its file, and one on the file beside it."""

    database: Database
    own: OwnSession
    mail: OwnSession

    def session(self, statement: Statement) -> OwnSession:
        return self.mail if re.search("dbqueue_(mail|cursors)", statement.text) else self.own

    def plan(self, statement: Statement) -> list[str]:
        rows = self.session(statement).execute(f"EXPLAIN QUERY PLAN {statement.text}", statement.params)
        return [str(row[3]) for row in rows]

    def steps(self, statement: Statement) -> int:
        """Of SQLite's machine; what the statement did is undone."""
        session, steps = self.session(statement), 0

        def count() -> int:
            nonlocal steps
            steps += 10
            return 0

        session.begin()
        session.connection.set_progress_handler(count, 10)
        try:
            session.execute(statement.text, statement.params)
        finally:
            session.connection.set_progress_handler(None, 0)
            session.rollback()
        return steps


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with opened(f"sqlite:///{tmp_path_factory.mktemp('plans') / 'big.db'}") as database:
        mail = database.dialect.mail_session()
        assert mail is not None
        with database.session() as own:
            broker.fill(database, own, mail)
            yield Broker(database, own, mail)
        mail.close()


@pytest.fixture(params=["never analysed", "analysed"])
def big(filled: Broker, request: pytest.FixtureRequest) -> Broker:
    for session in (filled.own, filled.mail):
        if request.param == "analysed":
            session.execute("ANALYZE")
        elif session.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'"):
            session.execute("DELETE FROM sqlite_stat1")
            session.execute("ANALYZE sqlite_master")  # reads the statistics, of which there are none, again
    return filled


# Verbs that read a table of queues or consumers whole, at most once in a while; the log is read whole when it is pruned. (The partial
# index of waiting jobs read whole is no such thing: it is the jobs of a later time, and no others.)
WHOLE = {"all_bindings", "keep_consumers", "abandoned_queues", "forget_dead_consumers", "mail_prune"}


@pytest.mark.parametrize("verb", [verb for verb in ALL_VERBS if verb not in WHOLE])
def test_a_statement_searches_by_an_index(big: Broker, verb: str) -> None:
    for statement in statements_of(big.database.dialect, ALL_VERBS[verb]):
        for line in big.plan(statement):
            assert not re.match(r"SCAN (dbqueue_\w+|[bceq])\b(?! USING INDEX dbqueue_jobs_waiting)", line), line


STEPS = {
    "find_exchange": 40, "declare_exchange": 80, "delete_exchange": 200, "find_queue": 40, "declare_queue": 120, "touch_queue": 80,
    "ready": 20 * LIMIT, "bind": 80, "unbind": 80, "is_bound": 40, "bindings_of": 100, "routes": 40 * FOLLOWERS, "add_consumer": 120,
    "store_result": 100, "load_result": 40, "load_results": 15_000, "describe_result": 40, "forget_result": 60, "save_group": 100,
    "load_group": 40, "delete_group": 60, "prune_results": 1_200, "prune_results_found": 4_000,
    "remove_consumer": 100, "consumer_count": 60, "expired_messages": 60, "mail_post": 60, "mail_open": 80, "mail_begin": 60,
    "mail_look": 20_000, "mail_move": 60, "mail_drop": 60,
}  # fmt: skip


@pytest.mark.parametrize("verb", STEPS)
def test_the_work_of_a_statement_does_not_grow(big: Broker, verb: str) -> None:
    for statement in statements_of(big.database.dialect, ALL_VERBS[verb]):
        assert big.steps(statement) <= STEPS[verb], statement.text


def test_a_direct_exchange_reads_its_own_bindings(big: Broker) -> None:
    for key in ("r7", "nobody's"):
        for statement in statements_of(big.database.dialect, lambda d, s: routing.routes(d, s, "replies", key)):  # noqa: B023
            assert big.steps(statement) <= 20 * FOLLOWERS


def test_the_queue_of_a_reply_goes_without_a_look_at_all_jobs(big: Broker) -> None:
    *short, later = statements_of(big.database.dialect, VERBS["delete_queue"])
    assert sum(big.steps(statement) for statement in short) <= 500
    assert "ready_at IS NULL" in later.text


def test_a_reader_that_is_far_behind_reads_one_batch(big: Broker) -> None:
    """And not, for each batch, all that is left."""
    dialect = big.database.dialect
    for statement in statements_of(dialect, lambda d, s: Overheard(d, s)._look(cast(OwnSession, s), "q4", EVENTS)):
        assert big.steps(statement) <= 60 * BATCH
    at, end, rows = Overheard(dialect, big.mail)._look(big.mail, "q4", EVENTS)
    assert (at, end, len(rows)) == (0, LETTERS, BATCH)


def test_every_index_of_the_messages_is_used_by_a_statement(big: Broker) -> None:
    """The migration has none that no plan needs: each is kept up by every write."""
    script = (files("dbqueue.database") / "migrations" / "sqlite" / "0002_messages.sql").read_text()
    made = set(re.findall(r"CREATE INDEX \{prefix\}(\w+)", script))
    assert len(made) == 3
    verbs: list[Verb] = list(VERBS.values())
    lines = [line for verb in verbs for s in statements_of(big.database.dialect, verb) for line in big.plan(s)]
    used = {name for line in lines for name in re.findall(r"INDEX dbqueue_(\w+)", line)}
    assert made <= used
