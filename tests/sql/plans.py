"""Execution plans of PostgreSQL, as prepared statements get them, and what they cost in rows and pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from dbqueue.database.dialect import OwnSession
from dbqueue.database.postgres_statements import PLANNING

Node = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    root: Node

    def nodes(self, under: Node | None = None) -> Iterator[Node]:
        node = self.root if under is None else under
        yield node
        for child in node.get("Plans", ()):
            yield from self.nodes(child)

    def table_scans(self) -> list[Node]:
        """The nodes that read a table, directly or (bitmap) through an index."""
        return [node for node in self.nodes() if "Relation Name" in node and "Scan" in node["Node Type"]]

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    @property
    def arbiters(self) -> set[str]:
        """The indexes that an ON CONFLICT asks."""
        return {name for node in self.nodes() for name in node.get("Conflict Arbiter Indexes", ())}

    @property
    def sequential(self) -> set[str]:
        return {node["Relation Name"] for node in self.table_scans() if node["Node Type"] == "Seq Scan"}

    @property
    def rows_read(self) -> int:
        """Rows that scans of tables returned or threw away; without what was never executed."""
        found = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        scans = [n for n in self.nodes() if "Scan" in n["Node Type"] and ("Relation Name" in n or "Index Name" in n)]
        return int(sum(sum(n.get(name, 0) for name in found) * n["Actual Loops"] for n in scans))

    @property
    def pages(self) -> int:
        return int(self.root["Shared Hit Blocks"] + self.root["Shared Read Blocks"])


def explain(session: OwnSession, statement: str, params: Mapping[str, Any], mode: str = "force_generic_plan") -> Plan:
    """Runs the statement as a prepared one, and undoes what it did. Custom plans know the values, generic ones do not; the mode
    "worker" has the settings of the worker's own transactions."""
    order: dict[str, int] = {}
    numbered = re.sub(r"%\((\w+)\)s", lambda m: f"${order.setdefault(m[1], len(order) + 1)}", statement)
    connection = session.connection
    values = sql.SQL(", ").join(sql.Literal(params[name]) for name in order)
    call = sql.SQL("EXECUTE explained({})").format(values) if order else sql.SQL("EXECUTE explained")
    connection.execute(f"PREPARE explained AS {numbered.replace('%%', '%')}")
    session.begin()
    try:
        connection.execute(PLANNING if mode == "worker" else f"SET LOCAL plan_cache_mode = {mode}")
        found = connection.execute(sql.SQL("EXPLAIN (ANALYZE, BUFFERS, VERBOSE, FORMAT JSON) ") + call).fetchone()
    finally:
        session.rollback()
        connection.execute("DEALLOCATE explained")
    return Plan(found[0][0]["Plan"])
