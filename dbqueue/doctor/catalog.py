"""What a database itself says of its tables, as the items of ``schema``. Reads catalogs only, which everybody may."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterator

from dbqueue.database import migrate
from dbqueue.database.dialect import Session
from dbqueue.database.sqlite import Sqlite, SqliteSession
from dbqueue.database.tables import Names
from dbqueue.doctor.schema import Item

_RELATIONS = """
SELECT c.oid::bigint, c.relname::text, c.relkind::text,
  CASE c.relpersistence WHEN 'p' THEN 'permanent' WHEN 'u' THEN 'unlogged' ELSE 'temporary' END
    || CASE WHEN c.relrowsecurity THEN ' with row security' ELSE '' END,
  COALESCE(c.reloptions, '{}')::text[]
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s::text AND c.relkind IN ('r', 'p', 'v', 'S') AND starts_with(c.relname::text, %(prefix)s::text)
"""

# NOT NULL is a constraint of its own since PostgreSQL 18; here it always stands beside its column.
_PARTS = """
SELECT a.attrelid::bigint, 'column', a.attname::text, format_type(a.atttypid, a.atttypmod)
  || CASE WHEN a.attcollation <> t.typcollation THEN ' COLLATE ' || a.attcollation::regcollation::text ELSE '' END
  || CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END || COALESCE(' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid), '')
  || CASE WHEN a.attidentity <> '' THEN ' IDENTITY' WHEN a.attgenerated <> '' THEN ' GENERATED' ELSE '' END
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
  LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = ANY(%(oids)s::bigint[]) AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT conrelid::bigint, 'constraint', conname::text, pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = ANY(%(oids)s::bigint[]) AND contype <> 'n'
UNION ALL
SELECT i.indrelid::bigint, 'index', c.relname::text,
  CASE WHEN i.indisunique THEN 'UNIQUE ' ELSE '' END || regexp_replace(pg_get_indexdef(i.indexrelid), '^.*? USING ', '')
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = ANY(%(oids)s::bigint[])
  AND NOT EXISTS (SELECT 1 FROM pg_constraint k WHERE k.conindid = i.indexrelid)
UNION ALL
SELECT tgrelid::bigint, 'trigger', tgname::text,
  regexp_replace(pg_get_triggerdef(oid), '^CREATE (CONSTRAINT )?TRIGGER ', '')
FROM pg_trigger WHERE tgrelid = ANY(%(oids)s::bigint[]) AND NOT tgisinternal
"""


def postgres(session: Session, names: Names, tables: Collection[str] | None = None) -> list[Item]:
    """``tables`` (without prefix): only these; other installations and the application's own tables may have names like
    ours."""
    items, owners = [], {}
    for oid, name, kind, persistence, options in session.execute(
        _RELATIONS, {"schema": names.schema, "prefix": names.prefix}
    ):
        table = name[len(names.prefix) :]
        if tables is None or table in tables:
            items.append(Item({"v": "view", "S": "sequence"}.get(kind, "table"), table, table, persistence))
            if kind == "S":
                continue
            owners[oid] = table
            items += [Item("option", table, *option.split("=", 1)) for option in options]
    for oid, kind, name, definition in session.execute(_PARTS, {"oids": list(owners)}):
        short = name if kind == "column" else name.removeprefix(names.prefix)
        items.append(Item(kind, owners[oid], short, " ".join(definition.split())))
    return items


# -- SQLite ------------------------------------------------------------------------------------------------------------


def sqlite_expected(dialect: Sqlite) -> list[Item]:
    """What the migrations make, by making it: in memory, and by this very SQLite."""
    memory = SqliteSession(sqlite3.connect(":memory:", isolation_level=None))
    try:
        migrate.migrate(dialect, memory)
        return sqlite(memory, dialect.names)
    finally:
        memory.close()


def sqlite(session: Session, names: Names, tables: Collection[str] | None = None) -> list[Item]:
    items: list[Item] = []
    rows = session.execute("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    for kind, name, owner, text in rows:
        table, short = owner.removeprefix(names.prefix), name.removeprefix(names.prefix)
        if not owner.startswith(names.prefix) or not (tables is None or table in tables):
            continue
        plain = " ".join(re.sub(r"--[^\n]*", "", text).split())
        if kind in ("table", "view"):
            items.append(Item(kind, table, table, _suffix(plain) if kind == "table" else "permanent"))
            items += _columns(session, owner, table)
            items += [Item("constraint", table, "check", check) for check in _checks(plain)] if kind == "table" else []
        elif kind == "index":
            unique = "UNIQUE " if plain.upper().startswith("CREATE UNIQUE") else ""
            items.append(Item("index", table, short, unique + plain[plain.index("(") :]))
        else:
            items.append(Item(kind, table, short, plain.partition(f"{name}")[2].strip(' "')))
    return items


def _columns(session: Session, owner: str, table: str) -> Iterator[Item]:
    for _, name, kind, required, default, key, *_ in session.execute(f'PRAGMA table_xinfo("{owner}")'):
        definition = f"{kind or 'ANY'}{' NOT NULL' if required else ''}{f' DEFAULT {default}' if default else ''}"
        yield Item("column", table, name, definition + (f" PRIMARY KEY {key}" if key else ""))


def _suffix(text: str) -> str:
    """STRICT or WITHOUT ROWID, after the last parenthesis."""
    return text.rpartition(")")[2].strip() or "permanent"


def _checks(text: str) -> Iterator[str]:
    """Only the table's text tells of them: each CHECK with its balanced parentheses."""
    for match in re.finditer(r"CHECK \(", text):
        depth, end = 0, match.end() - 1
        while end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        yield text[match.start() : end]


def table_names(items: Collection[Item]) -> set[str]:
    return {item.table for item in items}
