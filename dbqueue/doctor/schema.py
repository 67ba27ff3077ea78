"""Whether the live tables are what the migrations make: nothing dropped, added or changed by hand.

Both sides are flattened into items (a table, a column, an index ...), and the two sets compared. Constraints and
indexes are told apart by what they say and not by their names: one that was built anew under another name serves as
well. What the migrations make is, on SQLite, found by running them in memory. No such place exists on a server, and the
doctor must not create tables there: so for PostgreSQL a description is shipped beside the migrations (``schema.txt``; a
test keeps it true).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from dbqueue.database.tables import Names
from dbqueue.doctor.check import Finding, Problem, Status, verdict

WHOLE = ("table", "view", "sequence")
BY_DEFINITION = ("constraint", "index")
DESCRIPTION = "schema.txt"


class Item(NamedTuple):
    """``table`` and ``name`` are without the prefix of an installation."""

    kind: str
    table: str
    name: str
    definition: str

    @property
    def shown(self) -> str:
        return f"{self.kind} {self.table}.{self.name}" if self.kind == "column" else f"{self.kind} {self.name}"


class Difference(NamedTuple):
    """What the migrations make, and what is there instead; None: nothing."""

    expected: Item | None
    found: Item | None

    @property
    def kind(self) -> str:
        item = self.expected or self.found
        assert item is not None
        return item.kind

    @property
    def sentence(self) -> str:
        if self.found is None:
            assert self.expected is not None
            return f"{self.expected.shown} is missing ({self.expected.definition})"
        if self.expected is None:
            return f"{self.found.shown} is not dbqueue's ({self.found.definition})"
        return f"{self.expected.shown} is {self.found.definition}, it should be {self.expected.definition}"


def compare(expected: Collection[Item], found: Collection[Item]) -> list[Difference]:
    wanted, there = _without_equals(expected, found), _without_equals(found, expected)
    by_place = {item[:3]: item for item in there}
    pairs = [(item, by_place.pop(item[:3], None)) for item in wanted]
    gone = {item.table for item, other in pairs if item.kind in WHOLE and other is None}
    differences = [Difference(*pair) for pair in pairs if pair[0].kind in WHOLE or pair[0].table not in gone]
    return differences + [Difference(None, item) for item in by_place.values()]


def _without_equals(items: Collection[Item], others: Collection[Item]) -> list[Item]:
    known = {_identity(item) for item in others}
    return [item for item in items if _identity(item) not in known]


def _identity(item: Item) -> tuple[str, ...]:
    return (item.kind, item.table, item.definition) if item.kind in BY_DEFINITION else item


def judged_tables(differences: Iterable[Difference]) -> Finding:
    """All but the indexes."""
    remedy = "undo the change by hand; the tables belong to `dbqueue migrate` alone"
    problems = [Problem(_weight(d), d.sentence, remedy) for d in differences if d.kind != "index"]
    return verdict("tables", problems, "columns, constraints and views are what the migrations make")


def _weight(difference: Difference) -> Status:
    """An addition of somebody else's is a warning, unless every insert of ours must fail by it."""
    if difference.kind in ("option", "trigger"):
        return Status.WARNING
    if difference.kind == "table" and difference.found is not None and difference.found.definition == "permanent":
        return Status.WARNING  # more durable than need be, which only costs time
    if difference.expected is None and difference.found is not None:
        definition = difference.found.definition
        fails = difference.kind == "column" and "NOT NULL" in definition and "DEFAULT" not in definition
        return Status.FAILURE if fails else Status.WARNING
    return Status.FAILURE


def judged_indexes(names: Names, differences: Iterable[Difference], problems: Sequence[Problem] = ()) -> Finding:
    """A further index of somebody else's costs time at most; a unique one may refuse our rows."""
    found = list(problems)
    for difference in differences:
        if difference.kind != "index":
            continue
        if difference.expected is not None:
            remedy = _created(names, difference.expected)
            if difference.found is not None:
                remedy = f"DROP INDEX {names.qualified(difference.found.name)}; {remedy}"
            found.append(Problem(Status.FAILURE, difference.sentence, remedy))
        elif difference.found is not None and difference.found.definition.startswith("UNIQUE"):
            remedy = f"DROP INDEX {difference.found.name}, if it was not meant"
            found.append(Problem(Status.WARNING, f"{difference.sentence} and may refuse jobs", remedy))
    return verdict("indexes", found, "every index is there")


def _created(names: Names, index: Item) -> str:
    kind = "UNIQUE INDEX" if index.definition.startswith("UNIQUE ") else "INDEX"
    rest = index.definition.removeprefix("UNIQUE ")
    using = "" if rest.startswith("(") else "USING "  # SQLite has one kind of index, and does not say so
    return f'CREATE {kind} "{names.prefix}{index.name}" ON {names.qualified(index.table)} {using}{rest};'


def to_text(items: Iterable[Item]) -> str:
    return "".join(f"{item.kind} {item.table} {item.name}: {item.definition}\n" for item in sorted(items))


def from_text(text: str) -> list[Item]:
    items = []
    for line in text.splitlines():
        place, _, definition = line.partition(": ")
        kind, table, name = place.split(" ")
        items.append(Item(kind, table, name, definition))
    return items


def shipped(folder: str) -> list[Item]:
    """What the migrations of this version make on a server."""
    return from_text((files("dbqueue.database") / "migrations" / folder / DESCRIPTION).read_text(encoding="utf-8"))
