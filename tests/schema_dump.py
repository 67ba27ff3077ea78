"""A database's schema as text, the same for the same schema however it came about: what `tests/migrations/*.sql` hold."""

from __future__ import annotations

from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database

_COLUMNS = """
SELECT c.oid::regclass::text, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'public'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY c.oid::regclass::text, a.attnum
"""
_OPTIONS = """
SELECT oid::regclass::text, reloptions, relpersistence FROM pg_class
WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace ORDER BY oid::regclass::text
"""
# NOT NULL is a constraint since PostgreSQL 18; it stands beside its column already.
_CONSTRAINTS = """
SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace AND contype <> 'n' ORDER BY 1, 2
"""
_INDEXES = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY tablename, indexname"
_VIEWS = """
SELECT oid::regclass::text, pg_get_viewdef(oid) FROM pg_class
WHERE relkind = 'v' AND relnamespace = 'public'::regnamespace ORDER BY oid::regclass::text
"""
_OTHERS = """
SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace
UNION ALL SELECT 'sequence ' || relname FROM pg_class WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace
UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1
"""


def dump(database: Database) -> str:
    """Everything but rows. Raises nothing for an empty database: its dump is empty."""
    with database.session() as session:
        return _sqlite(session) if database.dialect.name == "sqlite" else _postgres(session)


def _sqlite(session: OwnSession) -> str:
    rows = session.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY tbl_name, type DESC, name")
    return "\n\n".join(f"{sql};" for (sql,) in rows) + "\n" if rows else ""


def _postgres(session: OwnSession) -> str:
    tables: dict[str, list[str]] = {}
    for table, name, kind, required, default in session.execute(_COLUMNS):
        column = f"{name} {kind}" + (" NOT NULL" if required else "") + (f" DEFAULT {default}" if default else "")
        tables.setdefault(table, []).append(column)
    for table, name, definition in session.execute(_CONSTRAINTS):
        tables[table].append(f"CONSTRAINT {name} {definition}")
    parts = []
    for table, options, persistence in session.execute(_OPTIONS):
        kind = {"u": "UNLOGGED TABLE"}.get(persistence, "TABLE")
        storage = f" WITH ({', '.join(sorted(options))})" if options else ""
        lines = ",\n    ".join(tables.get(table, []))
        parts.append(f"CREATE {kind} {table} (\n    {lines}\n){storage};")
    parts += [f"{index};" for (index,) in session.execute(_INDEXES)]
    parts += [f"CREATE VIEW {view} AS\n{definition}" for view, definition in session.execute(_VIEWS)]
    parts += [f"-- {other}" for (other,) in session.execute(_OTHERS)]
    return "\n\n".join(parts) + "\n" if parts else ""
