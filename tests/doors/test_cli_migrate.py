"""`dbqueue migrate`: applied, listed or printed; and looking makes nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dbqueue import DBQueue
from tests.doors.conftest import Run


def run_sql(url: str, script: str) -> None:
    """As an administrator would, with the database's own tool."""
    if url.startswith("sqlite"):
        connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.executescript(script)
    else:
        connection = psycopg.connect(url, autocommit=True)
        connection.execute(script)
    connection.close()


@pytest.mark.req("D6")
def test_migrate_applies_once(cli: Run, database_url: str) -> None:
    assert cli("migrate", "--url", database_url, "--dry-run") == (
        0,
        "would apply 0001_jobs\nwould apply 0002_messages\nwould apply 0003_schedules\nwould apply 0004_results\n",
        "",
    )
    assert cli("migrate", "--url", database_url, "--dry-run", "--json").json == {
        "dry_run": True, "migrations": [{"version": 1, "name": "jobs"}, {"version": 2, "name": "messages"},
            {"version": 3, "name": "schedules"},
            {"version": 4, "name": "results"},
        ],
    }  # fmt: skip
    assert cli("queues", "--url", database_url).code == 4, "a dry run, or a look, has made the tables"
    assert cli("migrate", "--url", database_url) == (
        0,
        "applied 0001_jobs\napplied 0002_messages\napplied 0003_schedules\napplied 0004_results\n",
        "",
    )
    assert cli("migrate", "--url", database_url) == (0, "", "Nothing to apply.\n")
    assert cli("migrate", "--url", database_url, "--json").json == {"dry_run": False, "migrations": []}
    assert cli("queues", "--url", database_url).code == 0


@pytest.mark.req("D6")
def test_the_printed_script_makes_the_same_schema(cli: Run, database_url: str) -> None:
    code, script, err = cli("migrate", "--url", database_url, "--sql")
    assert (code, err) == (0, "")
    run_sql(database_url, script)
    assert cli("migrate", "--url", database_url) == (0, "", "Nothing to apply.\n")
    assert cli("migrate", "--url", database_url, "--sql") == (0, "", "Nothing to apply.\n")
    queue = DBQueue(database_url, auto_migrate=False)
    queue.send("mail", {})
    assert queue.counts() == {"pending": 1}
    queue.close()


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("command", "code"),
    [(["migrate", "--dry-run"], 0), (["migrate", "--sql"], 0), (["queues"], 4), (["jobs", "list"], 4)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_looking_makes_no_file(cli: Run, database_url: str, tmp_path: Path, command: list[str], code: int) -> None:
    assert cli(*command, "--url", database_url).code == code
    assert not list(tmp_path.iterdir())


def test_sql_is_no_json(cli: Run, database_url: str) -> None:
    answer = cli("migrate", "--url", database_url, "--sql", "--json")
    assert (answer.code, answer.out, answer.error["error"]) == (2, "", "invalid_argument")


@pytest.mark.req("D6")
@pytest.mark.parametrize(
    "command", [["migrate"], ["migrate", "--dry-run"], ["migrate", "--sql"], ["queues"]], ids=" ".join
)
def test_a_newer_schema_is_refused(cli: Run, database_url: str, queue: DBQueue, command: list[str]) -> None:
    run_sql(database_url, "INSERT INTO dbqueue_migrations VALUES (99, 'future', 0)")
    code, out, err = cli(*command, "--url", database_url)
    assert (code, out) == (4, "")
    assert "upgrade celery-dbqueue" in err
    assert "[schema_too_new]" in err


def test_settings_give_prefix_and_schema_beside_url(
    cli: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBQUEUE_PREFIX", "own_")
    assert cli("migrate", "--url", database_url).code == 0
    monkeypatch.delenv("DBQUEUE_PREFIX")
    assert cli("queues", "--url", database_url).code == 4
    Path("dbqueue.toml").write_text('[jobs]\nprefix = "own_"\n')
    assert cli("queues", "--url", database_url).code == 0
    monkeypatch.setenv("DBQUEUE_URL", database_url)
    assert cli("queues").code == 0
