"""Migrations: numbered SQL files for each database, applied in order, each database's set in one transaction under a lock.

Several processes may start at once on an empty database: the lock lets one of them work and the others find it done. A schema
that is newer than this code is refused before anything is read. Never inside a caller's transaction: a rollback of theirs
would take the tables away again (D6).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from importlib.resources import files

from dbqueue.database.dialect import Dialect, OwnSession, Session
from dbqueue.database.tables import SCHEMA_VERSION, Names
from dbqueue.errors import SchemaMissing, SchemaOutdated, SchemaTooNew

_MIGRATIONS_TABLE = """CREATE TABLE {migrations} (
    version integer PRIMARY KEY,
    name text NOT NULL,
    applied_at bigint NOT NULL
)"""


@dataclass(frozen=True)
class Migration:
    version: int
    name: str
    script: str


def migrations(dialect_name: str, names: Names) -> list[Migration]:
    """The numbered files of one database with the table names written in, oldest first."""
    folder = "postgres" if dialect_name == "postgresql" else dialect_name
    found = []
    for entry in (files("dbqueue.database") / "migrations" / folder).iterdir():
        if entry.name.endswith(".sql"):
            number, _, name = entry.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(number), name, names.fill(entry.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda m: m.version)


def pending(dialect: Dialect, session: Session) -> list[Migration]:
    """What ``migrate`` would apply. Raises SchemaTooNew."""
    version = dialect.schema_version(session) or 0
    _refuse_newer(version)
    return [m for m in migrations(dialect.name, dialect.names) if m.version > version]


def migrate(dialect: Dialect, session: OwnSession) -> list[Migration]:
    """Applies what is pending, in one transaction of ``session``: a process that dies leaves the schema as it was."""
    if not pending(dialect, session):
        return []
    session.begin()
    try:
        dialect.lock_schema(session)
        todo = pending(dialect, session)  # another process may have done it while this one waited for the lock
        for migration in todo:
            _apply(dialect, session, migration)
        session.commit()
    except BaseException:
        session.rollback()
        raise
    return todo


def _apply(dialect: Dialect, session: OwnSession, migration: Migration) -> None:
    names = dialect.names
    if migration.version == 1:
        dialect.run_script(session, names.fill(_MIGRATIONS_TABLE) + ";\n")
    dialect.run_script(session, migration.script)
    if migration.version == 1:
        # Tells this database from every other one, however a URL spells it (socket, pooler, name).
        dialect.run_script(
            session, names.fill(f"INSERT INTO {{meta}} VALUES ('database_id', '{secrets.token_hex(16)}');\n")
        )
    record = f"INSERT INTO {{migrations}} VALUES ({migration.version}, '{migration.name}', {dialect.now(session)});\n"
    dialect.run_script(session, names.fill(record))


def script(dialect: Dialect, todo: list[Migration], now_expression: str) -> str:
    """The statements of ``migrate`` as text, for people who run their own DDL."""
    names, parts = dialect.names, []
    for migration in todo:
        if migration.version == 1:
            parts.append(names.fill(_MIGRATIONS_TABLE) + ";")
        parts.append(migration.script.strip())
        if migration.version == 1:
            parts.append(names.fill(f"INSERT INTO {{meta}} VALUES ('database_id', '{secrets.token_hex(16)}');"))
        parts.append(
            names.fill(
                f"INSERT INTO {{migrations}} VALUES ({migration.version}, '{migration.name}', {now_expression});"
            )
        )
    return "\n\n".join(["BEGIN;", *parts, "COMMIT;"]) + "\n" if parts else ""


def check(dialect: Dialect, session: Session) -> None:
    """Raises SchemaMissing, SchemaOutdated or SchemaTooNew unless the schema is exactly what this code knows."""
    version = dialect.schema_version(session)
    if version is None:
        raise SchemaMissing(
            "dbqueue's tables are not in this database: run `dbqueue migrate` or call queue.migrate() at start-up"
        )
    _refuse_newer(version)
    if version < SCHEMA_VERSION:
        raise SchemaOutdated(
            f"dbqueue's tables are at version {version}, this code needs {SCHEMA_VERSION}: run `dbqueue migrate`"
        )


def _refuse_newer(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"dbqueue's tables are at version {version}, this code knows {SCHEMA_VERSION}: upgrade celery-dbqueue in this program"
        )
