"""What can be wrong with a PostgreSQL server and with the session that its user gets. ``pooler`` looks at what stands
in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from dbqueue.doctor import catalog, pooler, privileges, schema
from dbqueue.doctor.check import Check, Finding, Patient, Problem, Status, counted, verdict

OLDEST_SERVER = 130_000
HELD_S = 300.0
"""Seconds after which an open transaction hinders vacuum, and the looks of a sleeper, for too long."""
HELD_XIDS = 1_000_000
"""Transactions since a slot's or another user's snapshot, whose age in seconds cannot be seen."""
DEAD_ROWS = 200_000
"""Autovacuum comes once a minute, and a busy queue of a thousand jobs a second leaves 120,000 dead rows until then."""

_TOO_SHORT_MS = {
    "statement_timeout": 5_000, "transaction_timeout": 5_000, "lock_timeout": 1_000,
    "idle_in_transaction_session_timeout": 1_000,
}  # fmt: skip
_SETTINGS = """
SELECT current_user::text, pg_is_in_recovery(), current_setting('server_version_num')::int,
  current_setting('server_version'),
  (SELECT json_object_agg(name, reset_val)::text FROM pg_settings WHERE name = ANY(%(names)s::text[]))
"""
_NAMES = [
    *_TOO_SHORT_MS, "idle_session_timeout", "default_transaction_isolation", "default_transaction_read_only",
    "synchronous_commit", "server_encoding", "autovacuum", "track_counts", "max_connections",
    "superuser_reserved_connections", "reserved_connections",
]  # fmt: skip


@dataclass(frozen=True)
class Server:
    """What the server says of itself and of our session. The settings are those that a new session gets."""

    user: str
    standby: bool
    number: int
    version: str
    settings: dict[str, str]


def _server(patient: Patient) -> Server:
    user, standby, number, version, settings = patient.session.execute(_SETTINGS, {"names": _NAMES})[0]
    return Server(user, standby, number, version, json.loads(settings))


def server(patient: Patient) -> Finding:
    """Notes ``stop`` on a standby, where not even LISTEN is allowed."""
    found, problems = _server(patient), []
    if found.number < OLDEST_SERVER:
        told = f"this is PostgreSQL {found.version}"
        problems.append(Problem(Status.FAILURE, told, "dbqueue needs PostgreSQL 13 or newer"))
    if found.standby:
        patient.notes.add("stop")
        remedy = "name the primary in the URL, or all servers with ?target_session_attrs=read-write"
        problems.append(Problem(Status.FAILURE, "this server is a standby and cannot be written to", remedy))
    if found.settings["server_encoding"] != "UTF8":
        told = f"the database's encoding is {found.settings['server_encoding']}, which cannot hold every name and key"
        problems.append(Problem(Status.WARNING, told, "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"))
    return verdict("server", problems, f"PostgreSQL {found.version}")


def session(patient: Patient) -> Finding:
    """What the role, the database or the URL set for every session. A worker's turn, an implicit transaction, takes
    these."""
    found = _server(patient)
    settings, problems = found.settings, []
    role = f"ALTER ROLE {privileges.quoted(found.user)} SET"
    if settings["default_transaction_read_only"] == "on":
        told = "default_transaction_read_only is on: nothing can be written"
        problems.append(Problem(Status.FAILURE, told, f"{role} default_transaction_read_only = off;"))
    isolation = settings["default_transaction_isolation"]
    if isolation not in ("read committed", "read uncommitted"):
        told = f"default_transaction_isolation is {isolation}: claims and settles meet serialization failures"
        problems.append(Problem(Status.WARNING, told, f"{role} default_transaction_isolation = 'read committed';"))
    for name, least in _TOO_SHORT_MS.items():
        if 0 < (value := int(settings.get(name, 0))) < least:
            told = f"{name} is {value} ms, which ends statements that only had to wait for a moment"
            problems.append(Problem(Status.WARNING, told, f"{role} {name} = '{least / 1000:g}s'; or more"))
    if (idle := int(settings.get("idle_session_timeout", 0))) > 0:
        told = f"idle_session_timeout is {idle} ms: it ends the connections on which idle workers listen"
        problems.append(Problem(Status.WARNING, told, f"{role} idle_session_timeout = 0;"))
    if settings["synchronous_commit"] == "off":
        told = "synchronous_commit is off: after a crash of the server, jobs that were enqueued or done are forgotten"
        problems.append(Problem(Status.WARNING, told, f"{role} synchronous_commit = on;"))
    return verdict("session", problems, f"user {found.user!r}: no default that disturbs")


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(patient: Patient) -> Finding:
    return schema.judged_tables(_differences(patient))


# What a failed REINDEX CONCURRENTLY leaves behind is named _ccnew or _ccold.
_INVALID = """
SELECT c.relname::text, c.relname !~ '_cc(new|old)[0-9]*$' FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
JOIN pg_class t ON t.oid = i.indrelid JOIN pg_namespace n ON n.oid = t.relnamespace
WHERE n.nspname = %(schema)s::text AND t.relname = ANY(%(tables)s::text[])
  AND NOT (i.indisvalid AND i.indisready) ORDER BY 1
"""


def indexes(patient: Patient) -> Finding:
    problems, names = [], patient.database.dialect.names
    tables = catalog.table_names(schema.shipped("postgres"))
    for index, wanted in patient.session.execute(_INVALID, _named(patient, tables)):
        place = f'"{names.schema}"."{index}"'
        told = f"index {index} is not valid: building it failed, and nobody uses it"
        if wanted:
            problems.append(Problem(Status.FAILURE, told, f"REINDEX INDEX CONCURRENTLY {place};"))
        else:
            problems.append(Problem(Status.WARNING, told, f"DROP INDEX {place};"))
    return schema.judged_indexes(names, _differences(patient), problems)


def _differences(patient: Patient) -> list[schema.Difference]:
    expected = schema.shipped("postgres")
    found = catalog.postgres(patient.session, patient.database.dialect.names, catalog.table_names(expected))
    return schema.compare(expected, found)


def _named(patient: Patient, tables: Iterable[str]) -> dict[str, object]:
    names = patient.database.dialect.names
    return {"schema": names.schema, "tables": [names.prefix + table for table in tables]}


# -- vacuum ------------------------------------------------------------------------------------------------------------

BUSY = ("jobs", "finished", "mail", "cursors")
"""Tables whose rows come and go all the time."""

_TABLES = """
SELECT c.relname::text, s.n_live_tup, s.n_dead_tup, pg_table_size(c.oid),
  extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::float8,
  COALESCE((SELECT option_value::bool FROM pg_options_to_table(c.reloptions)
    WHERE option_name = 'autovacuum_enabled'), true)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE n.nspname = %(schema)s::text AND c.relname = ANY(%(tables)s::text[]) ORDER BY c.relname DESC
"""


def _tables(patient: Patient) -> list[tuple[str, int, int, int, float | None, bool]]:
    return [
        (name, live or 0, dead or 0, size, age, on)
        for name, live, dead, size, age, on in patient.session.execute(_TABLES, _named(patient, BUSY))
    ]


def autovacuum(patient: Patient) -> Finding:
    settings, problems = _server(patient).settings, []
    for name in ("autovacuum", "track_counts"):
        if settings[name] != "on":
            told = f"{name} is off: dead rows stay, and every claim becomes slower"
            problems.append(Problem(Status.FAILURE, told, f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf();"))
    for table, *_, on in _tables(patient):
        if not on:
            told = f"autovacuum is switched off for {table}"
            problems.append(Problem(Status.FAILURE, told, f"ALTER TABLE {table} RESET (autovacuum_enabled);"))
    return verdict("autovacuum", problems, "autovacuum is on")


def dead_rows(patient: Patient) -> Finding:
    problems, told = [], []
    for table, live, dead, size, age, _ in _tables(patient):
        when = "never" if age is None else f"{age:.0f} s ago"
        seen = f"{table}: {live} rows and {dead} dead ones in {size / 2**20:.0f} MB, vacuumed {when}"
        told.append(seen)
        if dead > max(DEAD_ROWS, live):
            remedy = f"see the checks snapshots and autovacuum; then VACUUM {table};"
            problems.append(Problem(Status.WARNING, seen, remedy))
    return verdict("dead_rows", problems, "; ".join(told))


# A transaction without a snapshot holds vacuum back, too, as soon as it has written: by its own id.
_HOLDERS = """
SELECT 'session ' || pid || ' of ' || COALESCE(usename, '?')
    || COALESCE(' (' || NULLIF(application_name, '') || ')', '')
    || COALESCE(', ' || state, ''), extract(epoch FROM clock_timestamp() - xact_start)::float8,
  greatest(age(backend_xmin), age(backend_xid)), 'SELECT pg_terminate_backend(' || pid || ');'
FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND (datname = current_database() OR datname IS NULL) AND COALESCE(backend_type, '') <> 'autovacuum worker'
UNION ALL
SELECT 'prepared transaction ' || quote_literal(gid) || ' of ' || owner,
  extract(epoch FROM clock_timestamp() - prepared)::float8,
  age(transaction), 'COMMIT PREPARED ' || quote_literal(gid) || '; or ROLLBACK PREPARED'
FROM pg_prepared_xacts WHERE database = current_database()
UNION ALL
SELECT 'replication slot ' || slot_name || CASE WHEN active THEN '' ELSE ', which nobody uses,' END,
  CASE WHEN active THEN NULL ELSE 'Infinity'::float8 END, age(xmin),
  'SELECT pg_drop_replication_slot(' || quote_literal(slot_name) || ');'
FROM pg_replication_slots WHERE xmin IS NOT NULL
"""


def snapshots(patient: Patient) -> Finding:
    """Whatever keeps dead rows from being removed: open and prepared transactions, replication slots with feedback."""
    problems = []
    for who, seconds, xids, remedy in patient.session.execute(_HOLDERS):
        if (seconds or 0.0) >= HELD_S or (xids or 0) >= HELD_XIDS:
            since = f"for {seconds:.0f} s and " if seconds is not None and seconds != float("inf") else ""
            told = f"{who} holds dead rows back {since}for {counted(xids or 0, 'transaction')}"
            problems.append(Problem(Status.WARNING, told, f"end it, if it is not meant to be: {remedy}"))
    return verdict("snapshots", problems, f"no transaction has been open for more than {HELD_S:g} s")


# -- connections -------------------------------------------------------------------------------------------------------

_CONNECTIONS = """
SELECT (SELECT sum(numbackends) FROM pg_stat_database)::int, r.rolconnlimit, r.rolsuper,
  (SELECT count(*) FROM pg_stat_activity WHERE usesysid = r.oid)::int, d.datconnlimit,
  (SELECT numbackends FROM pg_stat_database WHERE datid = d.oid)::int
FROM pg_roles r, pg_database d WHERE r.rolname = current_user AND d.datname = current_database()
"""


def connections(patient: Patient) -> Finding:
    """The smallest room that is left, against what one worker may take: the pool of D18, the loop's own, the listening
    one."""
    settings = _server(patient).settings
    used, role_limit, superuser, of_role, database_limit, of_database = patient.session.execute(_CONNECTIONS)[0]
    reserved = int(settings["superuser_reserved_connections"]) + int(settings.get("reserved_connections", 0))
    most = int(settings["max_connections"])
    rooms = {f"max_connections = {most}, {reserved} of them reserved, {used} in use": most - reserved - used}
    if role_limit >= 0 and not superuser:
        rooms[f"the user's CONNECTION LIMIT {role_limit}, {of_role} in use"] = role_limit - of_role
    if database_limit >= 0 and not superuser:
        rooms[f"the database's CONNECTION LIMIT {database_limit}, {of_database} in use"] = database_limit - of_database
    told, room = min(rooms.items(), key=lambda item: item[1])
    room += 1  # the doctor's own
    workers = patient.queue.settings.workers
    needed = workers + 2 + int(patient.database.notify)
    if room >= needed:
        return Finding(
            "connections", Status.OK, f"{told}: room for {room}, a worker with {workers} slots takes {needed}"
        )
    return Finding(
        "connections", Status.WARNING,
        f"{told}: room for {max(0, room)} more, but a worker with {workers} slots may take {needed}",
        "raise the limit, lower `workers` (or -c), or put a pooler in between",
    )  # fmt: skip


FIRST = (
    Check("pooler", pooler.pooling, bounded=False),
    Check("server", server),
    Check("session", session),
    Check("privileges", privileges.check),
)
CHECKS = (
    Check("tables", tables),
    Check("indexes", indexes),
    Check("autovacuum", autovacuum),
    Check("dead_rows", dead_rows),
    Check("snapshots", snapshots),
    Check("connections", connections),
    Check("notify", pooler.notify, bounded=False),
)
