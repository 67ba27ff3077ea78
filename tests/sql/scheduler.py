"""What a beat asks of a database: its statements as they are sent, and ten thousand schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbqueue import schedules
from dbqueue.database.dialect import Dialect, Row, Session
from dbqueue.database.engine import Database
from dbqueue.schedules import Definition
from tests.sql.broker import Heard, Statement, Verb

SCHEDULES, UNPLANNED, LIMIT = 10_000, 20, 500
APP = "app"
"""The owner of as many others."""

NEW = Definition(name="new", spec="* * * * *", target="t", queue="q", payload=b"1", priority=9, max_attempts=3)


_SOMETHING = dict.fromkeys(schedules._TEXTS, "") | {"payload": b"", "fingerprint": b""}


class Answered(Heard):
    """Finds one schedule where one is looked for."""

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> list[Row]:
        super().execute(statement, params)
        for columns in (schedules._COLUMNS, schedules.SHOWN):
            if statement.startswith(f"SELECT {', '.join(columns)} FROM"):
                return [tuple(_SOMETHING.get(name, 0) for name in columns)]
        return [(0, None, None, None, None)] if "SELECT min(next_at)" in statement else []


VERBS: Mapping[str, Verb] = {
    "schedule_look": lambda d, s: schedules.look(d, s, ["", APP]),
    "schedule_due": lambda d, s: schedules.due(d, s, "", s.now, LIMIT),  # type: ignore[attr-defined]
    "schedule_unplanned": lambda d, s: schedules.unplanned(d, s, "", LIMIT),
    "schedule_ahead": lambda d, s: schedules.ahead(d, s, [""], s.now),  # type: ignore[attr-defined]
    "schedule_get": lambda d, s: schedules.get(d, s, "s7"),
    "schedule_find": schedules.find,
    "schedule_find_of": lambda d, s: schedules.find(d, s, APP),
    "schedule_put": lambda d, s: schedules.put(d, s, NEW),
    "schedule_declare": lambda d, s: schedules.put(d, s, NEW, replace=False),
    "schedule_pause": lambda d, s: schedules.pause(d, s, "s7"),
    "schedule_resume": lambda d, s: schedules.resume(d, s, "s7"),
    "schedule_reset": lambda d, s: schedules.reset(d, s, "s7"),
    "schedule_remove": lambda d, s: schedules.remove(d, s, "s7"),
}  # fmt: skip


def statements_of(dialect: Dialect, verb: Verb, now: int = 0) -> list[Statement]:
    heard = Answered()
    heard.now = now  # type: ignore[attr-defined]
    verb(dialect, heard)
    return heard.statements


def texts(dialect: Dialect) -> dict[str, str]:
    """Every text once, under the name of the first verb that sends it."""
    named: dict[str, str] = {}
    for name, verb in VERBS.items():
        for number, statement in enumerate(statements_of(dialect, verb), 1):
            if statement.text not in named.values():
                named[name if number == 1 else f"{name}_{number}"] = statement.text
    return named


def fill(database: Database, session: Session, due: int) -> None:
    """Of each owner ``SCHEDULES``, the first ``due`` of them due, and ``UNPLANNED`` that nobody has planned yet."""
    now = database.dialect.now(session)
    columns = (
        "owner, name, spec, timezone, catch_up, digest, target, queue, payload, priority, max_attempts, anchor, last_slot, next_at, "
        "planned, created_at, updated_at"
    )
    session.execute(
        database.dialect.portable(
            f"INSERT INTO {{schedules}} ({columns}) WITH RECURSIVE g(g) AS (SELECT 0 UNION ALL SELECT g + 1 FROM g WHERE g < :last) "
            "SELECT o.owner, 's' || g, '* * * * *', 'UTC', 'all', 'd', 'dbqueue.raw.q', 'q', CAST('1' AS "
            f"{'bytea' if database.dialect.listens else 'BLOB'}), 9, 3, :now - 60000000, :now - 60000000, "
            "CASE WHEN g < :due THEN :now - g WHEN g < :planned THEN :now + 60000000 + g END, "
            "CASE WHEN g < :planned THEN '* * * * * UTC' END, :now, :now FROM g, (SELECT '' AS owner UNION ALL SELECT 'app') o"
        ),
        {"last": SCHEDULES - 1, "due": due, "planned": SCHEDULES - UNPLANNED, "now": now},
    )
