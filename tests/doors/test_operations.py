"""docs/operations.md says what is true: its statements run, its tables are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from dbqueue import DBQueue, doctor, settings
from dbqueue.doctor import beat as beat_checks
from dbqueue.doctor import broker as broker_checks
from dbqueue.doctor import jobs as jobs_checks
from dbqueue.doctor import postgres, sqlite
from dbqueue.settings import Rule
from dbqueue.states import Kind
from tests.doors.conftest import ROOT, Run

DOCUMENT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables' lines, without the titles and the code quotes."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines][1:]


def test_the_table_of_contents() -> None:
    titles = re.findall(r"^## (.*)$", DOCUMENT, re.MULTILINE)
    links = re.findall(r"^\* \[(.*)\]\(#(.*)\)$", DOCUMENT, re.MULTILINE)
    assert [title for title, _ in links] == titles
    for title, anchor in links:
        assert anchor == re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def test_the_doctors_checks() -> None:
    common = [check.name for check in (*jobs_checks.CHECKS, *beat_checks.CHECKS, *broker_checks.CHECKS)]
    of_app = [check.name for check in jobs_checks.WITH_TARGETS]
    expected = dict.fromkeys(["distribution", "python", "schema", *common], "all") | dict.fromkeys(of_app, "all, -A")
    for module, name in ((postgres, "PostgreSQL"), (sqlite, "SQLite")):
        for check in (*module.FIRST, *module.CHECKS):
            expected[check.name] = "all" if check.name in expected else name
    told = {name: where.replace("`", "") for name, where, _ in rows(section("Is it well? `dbqueue doctor`"))}
    assert told == expected
    assert f"({doctor.PATIENCE:g} s)" in DOCUMENT


def test_the_settings() -> None:
    def shown(rule: Rule) -> tuple[str, str]:
        default = str(rule.default).lower() if isinstance(rule.default, bool) else str(rule.default or "")
        bounds = {int: f"{rule.low} to {rule.high}", bool: "true, false"}.get(rule.kind, "")
        return default, bounds

    told = {
        (table, name): (option, default, bounds)
        for table, name, option, default, bounds, _ in rows(section("Settings"))
    }
    options = {name: f"{option}=" for option, name in settings.OPTIONS.items()}
    assert told == {
        (table, name): (options.get(name, ""), *shown(rule))
        for table, rules in settings.TABLES.items()
        for name, rule in rules.items()
    }


@pytest.mark.databases("postgres")
def test_the_statements_for_people_run(queue: DBQueue, database_url: str) -> None:
    statements = re.findall(r"```sql\n(.*?)```", section("Reading the tables"), re.DOTALL)
    with psycopg.connect(database_url) as connection:
        for statement in "".join(statements).split(";\n"):
            if statement.strip():
                connection.execute(statement)


def test_the_kinds_of_error() -> None:
    told = next(says for name, says in rows(section("Reading the tables")) if name == "error_kind")
    assert told == ", ".join(kind.value for kind in Kind)


def test_the_commands_and_their_options_exist(cli: Run) -> None:
    """Every `dbqueue ...` in it is understood as far as its words and options go."""
    commands = re.findall(r"(?:^|`)(dbqueue [a-z][^`#\n]*)", DOCUMENT, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        words = command.split()[1:]
        names = [words[0]] if words[0] != "jobs" else words[:2] if len(words) > 1 else [words[0]]
        shown = cli(*names, "--help").out
        assert shown, command
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", shown), f"{option} of {command}"


@pytest.mark.databases("sqlite")
def test_a_copy_of_a_live_file(queue: DBQueue, tmp_path: Path, database: str) -> None:
    queue.send("mail", {})
    with queue.database.session() as session:
        session.execute(f"VACUUM INTO '{tmp_path / 'copy.db'}'")
    copy = DBQueue(f"sqlite:///{tmp_path / 'copy.db'}")
    assert copy.counts() == {"pending": 1}
    copy.close()
