"""The text of every statement that a database is sent, as it is sent. A change of one shows in review."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy

from dbqueue import locks, views
from dbqueue.clock import Clock
from dbqueue.database import postgres_statements, sqlite
from dbqueue.database.dialect import Dialect, Row, Session
from dbqueue.database.marks import Marks
from dbqueue.database.postgres import Postgres
from dbqueue.database.sqlite import Sqlite
from dbqueue.database.tables import ClaimRequest, Held, Names, Settlement, Turn
from dbqueue.ids import ZERO
from dbqueue.states import State
from tests.golden import Golden
from tests.sql import broker, scheduler

FOLDER = Path(__file__).with_name("golden")


def of_postgres() -> dict[str, str]:
    dialect = Postgres(sqlalchemy.make_url("postgresql://h/d"), Names("dbqueue_", "public"), Clock())
    session = _Marked()
    succeeded, acked = (Settlement(ZERO, ZERO, state, "q") for state in (State.SUCCEEDED, State.ACKED))
    claim = Turn(claim=ClaimRequest(("q",), 8, "w", ZERO, 1))

    def step(turn: Turn) -> str:
        return dialect._steps(session, turn)[0][1]  # type: ignore[arg-type]

    texts = {
        "enqueue": dialect._enqueue,
        "enqueue_many": dialect._enqueue_many,
        "enqueue_plain": dialect._enqueue_plain,
        "planning": postgres_statements.PLANNING,
        "settle_fast": step(Turn([succeeded])),
        "settle": step(Turn([acked])),
        "already": dialect._already,
        "renew": step(Turn(renewals=[Held(ZERO, ZERO)])),
        "claim_sweep": step(claim),
        "promote": dialect._text(postgres_statements.PROMOTE, 500),
        "expire": dialect._text(postgres_statements.EXPIRE, 500),
        "prune": dialect._text(postgres_statements.PRUNE, 1000),
    }
    session.marks.lanes["q", 9] = (1, ZERO)
    session.marks.swept("claim", 0)
    texts["claim_marked"] = step(claim)
    named = {
        name.lower(): dialect.names.fill(text)
        for name, text in vars(postgres_statements).items()
        if isinstance(text, str)
        and name.isupper()
        and not name.startswith("_")
        and re.search(r"\{(jobs|finished|schedules|results|chords)\}", text)
    }
    filled = {name: text for name, text in named.items() if not re.search(r"\{\w+\}", text)}
    return with_portable(dialect, filled | texts | of_views(dialect) | of_locks(dialect))


class _Marked:
    def __init__(self) -> None:
        self.marks = Marks()


def of_sqlite() -> dict[str, str]:
    dialect = Sqlite(sqlalchemy.make_url("sqlite:///queue.db"), Names("dbqueue_"), Clock())
    named = {
        name.lower(): dialect.names.fill(text)
        for name, text in vars(sqlite).items()
        if isinstance(text, str) and name.isupper() and not name.startswith("_") and re.search(r"\{\w+\}", text)
    }
    return with_portable(dialect, named | of_views(dialect) | of_locks(dialect))


def with_portable(dialect: Dialect, texts: dict[str, str]) -> dict[str, str]:
    portable = broker.texts(dialect) | scheduler.texts(dialect)
    return texts | {name: text for name, text in portable.items() if text not in texts.values()}


class _Heard(Session):
    """Keeps what it is told to execute."""

    changed = 0

    def __init__(self) -> None:
        self.last = ""

    def execute(self, statement: str, params: object = None) -> list[Row]:
        self.last = statement
        return [(0,)] if "jobs" not in statement else []


def of_locks(dialect: Dialect) -> dict[str, str]:
    texts = {
        "take": locks.TAKE,
        "seize": locks.SEIZE,
        "renew": locks.RENEW,
        "give_back": locks.GIVE_BACK,
        "sweep_up": locks.SWEEP_UP,
    }
    return {f"lock_{name}": dialect.portable(text) for name, text in texts.items()}


def of_views(dialect: Dialect) -> dict[str, str]:
    session, texts = _Heard(), {}
    views.get(dialect, session, ZERO)
    texts["view_get"] = session.last
    views.find(dialect, session, states=(State.DEAD, State.PENDING), queue="q", target="t", key="k", task_id="t")
    texts["view_find"] = session.last
    views.depths(dialect, session, "q")
    texts["view_depths"] = session.last
    views.counts(dialect, session, "q")
    texts["view_counts"] = session.last
    return texts


@pytest.mark.parametrize(("name", "texts"), [("postgres", of_postgres()), ("sqlite", of_sqlite())])
def test_the_statements_are_the_ones_in_the_golden_files(name: str, texts: dict[str, str], golden: Golden) -> None:
    if golden.update:
        for path in (FOLDER / name).glob("*.sql"):
            path.unlink()
    for statement, text in texts.items():
        assert not re.search(r"\{\w+\}", text), statement
        golden.check(FOLDER / name / f"{statement}.sql", text.strip() + "\n")
    assert {path.stem for path in (FOLDER / name).glob("*.sql")} == set(texts)
