"""What the transport asks of a database beside jobs: its statements as they are sent, and a broker that is in heavy use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from dbqueue import results, routing
from dbqueue.clock import SECOND
from dbqueue.database.dialect import Dialect, OwnSession, Row, Session
from dbqueue.database.engine import Database
from dbqueue.database.tables import Letter
from dbqueue.ids import ZERO
from dbqueue.mail import Mail
from dbqueue.routing import Exchange, Queue

QUEUES, LETTERS, JOBS, RESULTS = 5_000, 100_000, 100_000, 100_000
FOLLOWERS = 200
"""Queues that are bound to the fanout exchange, and as many clients that wait for a reply."""
LIMIT = 100

EVENTS = [("events", "topic", "#")]
OTHERS = [("silent", "topic", "#")]


@dataclass(frozen=True)
class Statement:
    text: str
    params: Mapping[str, Any]


class Heard(Session):
    """Keeps what it is told to execute. It finds nothing, counts to nought, and changes one row each time."""

    changed = 1

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def execute(self, statement: str, params: Mapping[str, Any] | None = None) -> list[Row]:
        if " FROM " not in statement.replace("epoch FROM", "") and statement.startswith("SELECT"):
            return [(0,)]  # the clock
        self.statements.append(Statement(statement, params or {}))
        if "max(id), count(*)" in statement:  # a batch that was not full
            return [(LETTERS, 1)]
        return [(0,)] if statement.startswith("SELECT count(*)") else []


class Overheard(Mail):
    """The log, whose statements go to another session than its own."""

    def __init__(self, dialect: Dialect, session: Session) -> None:
        self._dialect, self._session_of_test = dialect, session

    @contextmanager
    def _session(self, given: OwnSession | None = None) -> Iterator[OwnSession]:
        yield cast(OwnSession, self._session_of_test)


Verb = Callable[[Dialect, Session], object]

VERBS: Mapping[str, Verb] = {
    "find_exchange": lambda d, s: routing.find_exchange(d, s, "events"),
    "declare_exchange": lambda d, s: routing.declare_exchange(d, s, Exchange("new", "direct")),
    "delete_exchange": lambda d, s: routing.delete_exchange(d, s, "x7", if_unused=True),
    "find_queue": lambda d, s: routing.find_queue(d, s, "q7"),
    "declare_queue": lambda d, s: routing.declare_queue(d, s, Queue("new", durable=False, auto_delete=True)),
    "touch_queue": lambda d, s: routing.touch_queue(d, s, "q8"),
    "delete_queue": lambda d, s: routing.delete_queue(d, s, "q8"),
    "size": lambda d, s: routing.size(d, s, "q1"),
    "ready": lambda d, s: routing.ready(d, s, "q1", LIMIT),
    "bind": lambda d, s: routing.bind(d, s, "events", "q8", "task.#"),
    "unbind": lambda d, s: routing.unbind(d, s, "events", "q8", "task.#"),
    "is_bound": lambda d, s: routing.is_bound(d, s, "x7", "q7", "k"),
    "bindings_of": lambda d, s: routing.bindings_of(d, s, "q7"),
    "all_bindings": routing.all_bindings,
    "routes": lambda d, s: routing.routes(d, s, "pidbox", ""),
    "add_consumer": lambda d, s: routing.add_consumer(d, s, "new", "q7", "w", SECOND),
    "keep_consumers": lambda d, s: routing.keep_consumers(d, s, "w7", SECOND),
    "remove_consumer": lambda d, s: routing.remove_consumer(d, s, "t8", "q8"),
    "consumer_count": lambda d, s: routing.consumer_count(d, s, "q7"),
    "abandoned_queues": lambda d, s: routing.abandoned_queues(d, s, SECOND),
    "forget_dead_consumers": lambda d, s: routing.forget_dead_consumers(d, s, SECOND),
    "expired_messages": lambda d, s: routing.expired_messages(d, s, 0, LIMIT),
    "revoke": lambda d, s: routing.revoke(d, s, ["t7"], SECOND),
    "revoked_among": lambda d, s: routing.revoked_among(d, s, ["t7", "t8", "t9"]),
    "waiting_messages": lambda d, s: routing.waiting_messages(d, s, "t7"),
    "waiting_heads": lambda d, s: routing.waiting_heads(d, s, b"stamps", ZERO, LIMIT),
    "mail_post": lambda d, s: Overheard(d, s).post(Letter("events", "task", b"{}", b"", SECOND, ("bell",))),
    "mail_open": lambda d, s: Overheard(d, s).open("new"),
    "mail_begin": lambda d, s: Overheard(d, s)._begin(cast(OwnSession, s), "new"),
    "mail_look": lambda d, s: Overheard(d, s)._look(cast(OwnSession, s), "q2", EVENTS),
    "mail_move": lambda d, s: Overheard(d, s)._move(cast(OwnSession, s), "q2", LETTERS - 500, LETTERS),
    "mail_drop": lambda d, s: Overheard(d, s).drop("q2"),
    "mail_prune": lambda d, s: Overheard(d, s).prune(),
}  # fmt: skip


RESULT_VERBS: Mapping[str, Verb] = {
    "store_result": lambda d, s: results.store(d, s, "task7", "SUCCESS", b"{}", SECOND),
    "load_result": lambda d, s: results.load(d, s, ["task7"]),
    "load_results": lambda d, s: results.load(d, s, [f"task{g}" for g in range(0, 100_000, 200)]),
    "describe_result": lambda d, s: results.describe(d, s, "task7", with_size=True),
    "forget_result": lambda d, s: results.forget(d, s, "task7"),
    "save_group": lambda d, s: results.save_group(d, s, "task7", b"{}", SECOND),
    "load_group": lambda d, s: results.load_group(d, s, "task7"),
    "delete_group": lambda d, s: results.delete_group(d, s, "task7"),
    "prune_results": lambda d, s: results.prune(d, s, LIMIT),
    "prune_results_found": lambda d, s: results._delete(d, s, "results", "task_id", [f"task{g}" for g in range(50)]),
}  # fmt: skip
"""Of the result backend."""

ALL_VERBS = {**VERBS, **RESULT_VERBS}


def statements_of(dialect: Dialect, verb: Verb) -> list[Statement]:
    heard = Heard()
    verb(dialect, heard)
    return heard.statements


def texts(dialect: Dialect) -> dict[str, str]:
    """Every text once, under the name of the first verb that sends it; a verb's second and later ones are numbered."""
    named: dict[str, str] = {}
    for name, verb in ALL_VERBS.items():
        for number, statement in enumerate(statements_of(dialect, verb), 1):
            if statement.text not in named.values():
                named[name if number == 1 else f"{name}_{number}"] = statement.text
    return named


_NUMBERS = "WITH RECURSIVE g(g) AS (SELECT 0 UNION ALL SELECT g + 1 FROM g WHERE g < {last}) "
_TABLES = (
    "INSERT INTO {exchanges} VALUES ('pidbox', 'fanout', :no, :no, '{}'), ('events', 'topic', :yes, :no, '{}'), "
    "('replies', 'direct', :no, :no, '{}')",
    _NUMBERS + "INSERT INTO {exchanges} SELECT 'x' || g, 'direct', :yes, :no, '{}' FROM g WHERE g < 1000",
    _NUMBERS + "INSERT INTO {queues} (name, durable, auto_delete, exclusive, brief, expires_ms, arguments, used_at) "
    "SELECT 'q' || g, :yes, g % 2 = 0, :no, g % 2 = 0, CASE WHEN g % 2 = 0 THEN 600000 END, '{}', :now FROM g",
    _NUMBERS + "INSERT INTO {bindings} SELECT 'x' || (g % 1000), 'q' || g, 'k' FROM g",
    _NUMBERS + f"INSERT INTO {{bindings}} SELECT 'pidbox', 'q' || g, '' FROM g WHERE g < {FOLLOWERS}",
    _NUMBERS + f"INSERT INTO {{bindings}} SELECT 'replies', 'q' || g, 'r' || g FROM g WHERE g < {FOLLOWERS}",
    _NUMBERS + "INSERT INTO {consumers} SELECT 't' || g, 'q' || g, 'w' || (g % 100), :now + 600000000 FROM g",
    _NUMBERS + "INSERT INTO {revoked} SELECT 'task' || g, :now + 600000000 FROM g",
)
_RESULTS = (
    _NUMBERS
    + "INSERT INTO {results} (task_id, state, meta, expires_at, stored_at) SELECT 'task' || g, 'SUCCESS', $NONE, "
    "CASE WHEN g < 50 THEN g - 50 ELSE :now + 600000000 + g END, :now FROM g",
    _NUMBERS
    + "INSERT INTO {groups} (group_id, meta, expires_at) SELECT 'task' || g, $NONE, :now + 600000000 + g FROM g",
    _NUMBERS + "INSERT INTO {chords} (group_id, size, expires_at) SELECT 'task' || g, 2, :now + 600000000 + g FROM g",
)
_JOBS = (
    _NUMBERS + "INSERT INTO {jobs} (id, target, queue, priority, payload, head, state, run_at, ready_at, max_attempts, "
    "expires_at, created_at, updated_at) SELECT $ID, 'dbqueue.message.t', 'q' || (g % 4), 9, $NONE, $NONE, 0, "
    ":now + CASE WHEN g % 2 = 0 THEN 0 ELSE 1000000000 END, "
    "CASE WHEN g % 2 = 0 THEN :now - g END, 1, CASE WHEN g % 10 = 0 THEN :now + 900000000 END, :now, :now FROM g"
)
_MAIL = (
    _NUMBERS + "INSERT INTO {mail} (id, exchange, routing_key, head, payload, expires_at) "
    "SELECT g + 1, CASE WHEN g % 100 = 0 THEN 'pidbox' ELSE 'events' END, 'task', $NONE, $NONE, :now + 900000000 FROM g",
    _NUMBERS + f"INSERT INTO {{cursors}} SELECT 'q' || g, CASE WHEN g = 4 THEN 0 ELSE {LETTERS - 500} END FROM g",
)


def fill(database: Database, session: Session, mail: Session) -> None:
    """Thousands of queues and consumers, 100,000 letters of which most readers have seen all but the last 500 (queue q4: none), and
    100,000 messages in four queues, half of them for a later time. 100,000 results, 50 of which have expired."""
    dialect = database.dialect
    now = dialect.now(session)
    for text in _TABLES:
        _run(dialect, session, text, QUEUES, now)
    _run(dialect, session, _JOBS, JOBS, now)
    for text in _RESULTS:
        _run(dialect, session, text, RESULTS, now)
    for text, count in zip(_MAIL, (LETTERS, QUEUES), strict=True):
        _run(dialect, mail, text, count, now)
    if dialect.name == "postgresql":
        mail.execute(dialect.portable(f"SELECT setval('{{mail_ids}}', {LETTERS})"))


def _run(dialect: Dialect, session: Session, text: str, count: int, now: int) -> None:
    known = {"now": now, "yes": True, "no": False}
    new_id, none = ("gen_random_uuid()", "''::bytea") if dialect.name == "postgresql" else ("randomblob(16)", "x''")
    filled = dialect.portable(text.replace("{last}", str(count - 1)).replace("$ID", new_id).replace("$NONE", none))
    if dialect.name == "postgresql":
        filled = filled.replace("%(now)s", "%(now)s::bigint").replace(" % ", " %% ")
    session.execute(filled, {name: value for name, value in known.items() if f":{name}" in text})
