"""Who may do what: the fewest rights on PostgreSQL with which each kind of program works, and what the connection's
user lacks of them.

docs/operations.md prints ``grants`` word for word, and a test takes each single right away and sees its role fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dbqueue.database.tables import FINISHED_COLUMNS, JOB_COLUMNS, Names
from dbqueue.doctor.check import Finding, Patient, Problem, Status, verdict
from dbqueue.errors import SchemaMissing
from dbqueue.schedules import SHOWN

ALL: tuple[str, ...] = ()
"""In the place of columns: the right on the whole table."""


class Right(NamedTuple):
    table: str
    verb: str
    columns: tuple[str, ...] = ALL


def _shown(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Without payload and head, which are the application's, the token, a claim's secret, and what no view reads."""
    return tuple(column for column in columns if column not in ("payload", "head", "token", "queued_at", "expires_at"))


# What every program reads first: is the schema there, of which version, and which database is this.
_LOOK = (Right("migrations", "SELECT"), Right("meta", "SELECT"))
# An INSERT with ON CONFLICT and RETURNING reads these of the jobs, and a lost answer is looked for by id. No payload.
_PUBLISH = (
    Right("jobs", "INSERT"),
    Right("jobs", "SELECT", ("id", "target", "key", "state", "run_at", "created_at")),
    Right("finished", "SELECT", ("id",)),
)
# Celery's publisher also declares the queue, and its declaration counts what is ready there. No letters: with them it could speak to
# the workers' remote control.
_PUBLISH_MESSAGES = (
    Right("jobs", "INSERT"),
    Right("jobs", "SELECT", (
        "id", "target", "key", "queue", "priority", "state", "run_at", "ready_at", "created_at", "expires_at",
    )),
    Right("finished", "SELECT", ("id",)),
    *(Right(table, verb) for table in ("exchanges", "queues", "bindings") for verb in ("SELECT", "INSERT")),
    Right("consumers", "SELECT", ("queue", "alive_until")),
)  # fmt: skip
# Consumers declare, bind and delete queues, and keep rows of their own; control, events and replies are letters.
_CONSUME = (
    *(Right("exchanges", verb) for verb in ("SELECT", "INSERT")),
    *(Right("queues", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE")),
    *(Right("bindings", verb) for verb in ("SELECT", "INSERT", "DELETE")),
    *(Right("consumers", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE")),
    *(Right("mail", verb) for verb in ("SELECT", "INSERT", "DELETE")),
    Right("mail_ids", "USAGE"),
    *(Right("cursors", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE")),
    *(Right("revoked", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE")),
)
# A worker's children store, count and prune, which locks rows; DELETE is what forget() needs, too.
_STORE = tuple(
    Right(table, verb)
    for table in ("results", "groups", "chords", "chord_parts")
    for verb in ("SELECT", "INSERT", "UPDATE", "DELETE")
    if (table, verb) != ("chord_parts", "UPDATE")
)
# A client waits for results, saves groups, and says how many parts a chord has.
_WAIT = (
    Right("results", "SELECT"),
    *(Right(table, verb) for table in ("groups", "chords") for verb in ("SELECT", "INSERT", "UPDATE")),
)
_JOBS = tuple(Right("jobs", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE"))
# FOR UPDATE SKIP LOCKED, which prune needs, asks for UPDATE even where nothing is updated.
_HISTORY = tuple(Right("finished", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE"))
_LOCK = tuple(Right("locks", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE"))
_READ = (
    Right("jobs", "SELECT", _shown(JOB_COLUMNS)),
    Right("finished", "SELECT", _shown(FINISHED_COLUMNS)),
    Right("all_jobs", "SELECT"),
    Right("schedules", "SELECT", SHOWN),
    Right("results", "SELECT", ("task_id", "state", "expires_at", "stored_at")),
)

_SCHEDULES = tuple(Right("schedules", verb) for verb in ("SELECT", "INSERT", "UPDATE", "DELETE"))
# The locks of a beat ask for UPDATE; what code declares is inserted when it starts.
_BEAT = (*_SCHEDULES[:3], Right("jobs", "INSERT"), Right("jobs", "SELECT", ("id",)))

# FOR SHARE asks for UPDATE, too.
_OWN = tuple(Right("owners", verb) for verb in ("SELECT", "INSERT", "UPDATE"))

ROLES: Mapping[str, tuple[Right, ...]] = {
    "publisher": (*_LOOK, *_PUBLISH),
    "worker": (*_LOOK, *(Right("jobs", verb) for verb in ("SELECT", "UPDATE", "DELETE")), *_HISTORY),
    "locker": (*_LOOK, *_LOCK),
    "beat": (*_LOOK, *_BEAT),
    "scheduler": (*_LOOK, *_SCHEDULES),
    "operator": (
        *_LOOK,
        *_JOBS,
        *_HISTORY,
        *_SCHEDULES,
        *_CONSUME,
        Right("exchanges", "DELETE"),
        *_LOCK,
        *_STORE,
    ),
    "reader": (*_LOOK, *_READ),
    "celery_publisher": (*_LOOK, *_PUBLISH_MESSAGES),
    "celery_worker": (*_LOOK, *_JOBS, *_HISTORY, *_CONSUME),
    "celery_beat": (*_LOOK, *_PUBLISH_MESSAGES, *_SCHEDULES[:3], *_OWN),
    "results_worker": (*_LOOK, *_STORE),
    "results_client": (*_LOOK, *_WAIT),
}
"""An operator's are everything that a program can need which enqueues, works and looks, as most do, with Celery or without."""
EVERYTHING = "operator"


def grants(rights: tuple[Right, ...], names: Names, grantee: str) -> Iterator[str]:
    """The statements that give these rights, one for each table or sequence."""
    tables: dict[str, dict[str, tuple[str, ...]]] = {}
    for right in rights:
        tables.setdefault(right.table, {})[right.verb] = right.columns
    for table, verbs in tables.items():
        whole = [verb for verb, columns in verbs.items() if not columns]
        parts = whole + [f"{verb} ({', '.join(columns)})" for verb, columns in verbs.items() if columns]
        yield f"GRANT {', '.join(parts)} ON {place(table, whole, names).replace(chr(34), '')} TO {grantee};"


def place(table: str, verbs: Sequence[str], names: Names) -> str:
    """What stands behind ON. Of all rights only a sequence's is USAGE."""
    return ("SEQUENCE " if "USAGE" in verbs else "") + names.qualified(table)


_RELATIONS = """
SELECT c.relname::text, has_schema_privilege(n.oid, 'USAGE')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s::text AND c.relname = ANY(%(tables)s::text[])
"""
_HELD = """
SELECT r.n, CASE WHEN r.verb = 'USAGE' THEN has_sequence_privilege(c.oid, r.verb)
  WHEN cardinality(r.columns) = 0 THEN has_table_privilege(c.oid, r.verb)
  ELSE (SELECT bool_and(has_column_privilege(c.oid, a.name, r.verb)) FROM unnest(r.columns) a(name)) END
FROM (SELECT n, verb, relation, COALESCE(string_to_array(NULLIF(columns, ''), ','), '{}') AS columns
  FROM unnest(%(numbers)s::int[], %(verbs)s::text[], %(relations)s::text[], %(columns)s::text[])
    u(n, verb, relation, columns)) r
JOIN pg_class c ON c.relname = r.relation JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s::text
"""


def check(patient: Patient) -> Finding:
    """Asks the catalogs only, so that it can also tell why a user may not even look. Notes ``stop`` then. Raises
    SchemaMissing."""
    names, rights = patient.database.dialect.names, ROLES[patient.role or EVERYTHING]
    tables = {right.table: names.prefix + right.table for right in rights}
    relations = {"schema": names.schema, "tables": list(tables.values())}
    found: dict[str, bool] = {row[0]: row[1] for row in patient.session.execute(_RELATIONS, relations)}
    if names.prefix + "migrations" not in found:
        raise SchemaMissing("dbqueue's tables are not in this database: run `dbqueue migrate`")
    user = patient.session.execute("SELECT current_user::text")[0][0]
    problems = []
    if not all(found.values()):
        told = f"user {user!r} may not use the schema {names.schema!r}"
        problems.append(Problem(Status.FAILURE, told, f"GRANT USAGE ON SCHEMA {names.schema} TO {quoted(user)};"))
    params = {
        "schema": names.schema,
        "numbers": list(range(len(rights))),
        "verbs": [right.verb for right in rights],
        "relations": [tables[right.table] for right in rights],
        "columns": [",".join(right.columns) for right in rights],
    }
    held: dict[int, bool] = {row[0]: row[1] for row in patient.session.execute(_HELD, params)}
    lacking = tuple(
        right for number, right in enumerate(rights) if not held.get(number, True)
    )  # or there is no such table
    if lacking:
        told = ", ".join(dict.fromkeys(f"{right.verb} on {tables[right.table]}" for right in lacking))
        remedy = " ".join(grants(lacking, names, quoted(user)))
        as_role = f" as a {patient.role}" if patient.role else ""
        problems.append(Problem(Status.FAILURE, f"user {user!r} lacks{as_role}: {told}", remedy))
    if not all(found.values()) or any(right in lacking for right in _LOOK):
        patient.notes.add("stop")
    may = f"what a {patient.role} does" if patient.role else "everything that dbqueue does"
    return verdict("privileges", problems, f"user {user!r} may do {may}")


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
