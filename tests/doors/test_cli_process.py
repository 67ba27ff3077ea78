"""The command as a process: its exit codes, its streams, and what never gets into them."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from dbqueue import DBQueue, __version__
from dbqueue.cli import output
from dbqueue.database import sqlite
from tests.doors.conftest import ROOT, Run
from tests.doors.test_cli_migrate import run_sql

NOBODY = "0198a000-0000-7000-8000-000000000000"
SECRET = "p4ssw0rd"
UNREACHABLE = f"postgresql://app:{SECRET}@127.0.0.1:1/shop?password={SECRET}2"


def test_0_and_1_done_and_refused(process: Run, database_url: str, jobs: dict[str, UUID]) -> None:
    code, out, err = process("jobs", "retry", jobs["dead"], NOBODY, "--url", database_url)
    assert (code, out) == (1, f"{jobs['dead']} is pending (was dead)\n")
    assert err == f"Error: there is no job {NOBODY}, or its history was pruned [job_not_found]\n"
    assert process("jobs", "cancel", jobs["dead"], "--url", database_url) == (
        0, f"{jobs['dead']} is cancelled (was pending)\n", "",
    )  # fmt: skip


def test_2_usage_and_configuration(process: Run) -> None:
    code, out, err = process("jobs", "list", "--nonsense")
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"Error: No such option.*--nonsense.* \(see dbqueue jobs list --help\) \[invalid_argument\]\n", err
    )
    Path("dbqueue.toml").write_text("[jobs]\nlease_ms = '60'\n")
    answer = process("queues", "--json")
    assert (answer.code, answer.out, answer.error["error"]) == (2, "", "config_error")


@pytest.mark.req("D10")
@pytest.mark.parametrize("form", [[], ["--json"], ["--traceback"]], ids=str)
def test_3_unreachable(process: Run, form: list[str]) -> None:
    code, out, err = process("queues", "--url", UNREACHABLE, *form)
    assert (code, out) == (3, "")
    assert "connection_lost" in err
    assert "postgresql://app:***@127.0.0.1:1/shop" in err
    assert ("Traceback" in err) == (form == ["--traceback"])
    assert SECRET not in err


@pytest.mark.databases("sqlite")
def test_3_busy(cli: Run, database_url: str, jobs: dict[str, UUID], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LOCK_PATIENCE", 0.05)
    holder = sqlite3.connect(database_url.removeprefix("sqlite:///"), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    answer = cli("jobs", "cancel", jobs["pending"], "--url", database_url, "--json")
    assert (answer.code, answer.error["error"]) == (3, "database_busy")
    assert answer.json == {"results": []}
    assert cli("jobs", "show", jobs["pending"], "--url", database_url).code == 0, "reading needs no lock"
    holder.close()


def test_3_a_file_that_cannot_be_opened(cli: Run, tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}", f"sqlite:///{tmp_path}/none/a.db"):
        code, _, err = cli("migrate", "--url", url)
        assert code == 3
        assert "[connection_lost]" in err


@pytest.mark.req("D6")
def test_4_schema(process: Run, cli: Run, database_url: str) -> None:
    missing = process("jobs", "list", "--url", database_url, "--json")
    assert (missing.code, missing.out, missing.error["error"]) == (4, "", "schema_missing")
    assert cli("migrate", "--url", database_url).code == 0
    run_sql(database_url, "DELETE FROM dbqueue_migrations WHERE version > 1")
    outdated = process("jobs", "list", "--url", database_url, "--json")
    assert (outdated.code, outdated.error["error"]) == (4, "schema_outdated")
    run_sql(database_url, "UPDATE dbqueue_migrations SET version = 99 WHERE version = 1")
    too_new = cli("jobs", "list", "--url", database_url, "--json")
    assert (too_new.code, too_new.error["error"]) == (4, "schema_too_new")


@pytest.mark.usefixtures("queue")
def test_70_a_bug(cli: Run, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr(DBQueue, "queues", broken)
    code, out, err = cli("queues", "--url", database_url)
    assert (code, out) == (70, "")
    assert err == "Error: KeyError where none was expected; --traceback shows where [queue_error]\n"


@pytest.mark.databases("sqlite")
def test_a_reader_that_goes_away_is_no_error(database_url: str, queue: DBQueue) -> None:
    for number in range(900):
        queue.send("mail", {}, key=str(number))
    command = [sys.executable, "-m", "dbqueue", "jobs", "list", "--limit", "1000", "--url", database_url, "--json"]
    # Without a buffer Python itself forgets what a pipe did not take, and there is no error to be quiet about.
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.databases("sqlite")
def test_a_terminal_without_unicode_shows_escapes(
    process: Run, database_url: str, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("почта", {"an": "müller"})
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    code, out, err = process("queues", "--url", database_url)
    assert (code, err) == (0, "")
    assert "\\u043f" in out


@pytest.mark.req("D10")
@pytest.mark.parametrize(
    "words",
    [
        ["migrate", UNREACHABLE],
        ["jobs", "list", "--limit", UNREACHABLE],
        ["jobs", "list", f"--limit={UNREACHABLE}"],
        ["jobs", "list", "--state", f"postgresql://app:a b)'\"{SECRET}@h/d"],
        ["jobs", "show", UNREACHABLE],
        ["queues", "-A", UNREACHABLE],
        ["queues", "-A", f"shop:{UNREACHABLE}"],
        [UNREACHABLE],
        ["queues", "--url", f"mysql://app:{SECRET}@h/d"],
        ["queues", "--url", f"postgresql://app:{SECRET}@h:port/d"],
        ["queues", "--url", f"postgresql://app:{SECRET}@h/d?schema={SECRET}&schema=x"],
        ["queues", "--url", f"postgresql://app:{SECRET}@127.0.0.1:1/d?nonsense={SECRET}"],
        ["queues", "--url", f"sqlite:///a.db?nonsense={SECRET}"],
        ["worker", "-Q", UNREACHABLE, "-A", "nowhere"],
        ["worker", "-n", "%x", "-P", UNREACHABLE],
    ],
    ids=lambda words: " ".join(words).replace("/", "_"),
)
@pytest.mark.parametrize("form", ["--json", "--traceback"])
def test_a_password_in_the_wrong_place_is_never_repeated(cli: Run, words: list[str], form: str) -> None:
    code, out, err = cli(*words, form)
    assert code in (2, 3)
    assert out == ""
    assert SECRET not in err
    assert err


@pytest.mark.req("D10")
def test_a_password_never_shows(
    cli: Run, database: str, database_url: str, jobs: dict[str, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in results, not in help, not in the traceback of an error that quotes it."""
    secret = urlsplit(database_url).password or SECRET

    def broken(*_: object) -> None:
        raise KeyError(f"the connection of {secret} failed, {database_url}")

    monkeypatch.setenv("DBQUEUE_URL", database_url)
    told = [cli("jobs", "list"), cli("migrate", "--dry-run", "--json"), cli("migrate", "--sql"), cli("migrate", "-h")]
    told += [cli("queues", "--json"), cli("jobs", "show", jobs["dead"], "--payload"), cli("-h")]
    if database == "postgres":
        monkeypatch.setattr(DBQueue, "queues", broken)
        told.append(cli("queues", "--traceback"))
        assert "the connection of *** failed" in told[-1].err
    assert all(secret not in answer.out + answer.err for answer in told)


def test_version_and_help(cli: Run) -> None:
    assert cli("--version") == (0, f"dbqueue {__version__}\n", "")
    for command in ([], ["worker"], ["migrate"], ["queues"], ["jobs"], ["doctor"], ["health"]):
        code, out, _ = cli(*command, "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= output.WIDTH
    for verb in ("list", "show", "retry", "cancel", "resolve", "purge"):
        assert f"\n  dbqueue jobs {verb} " in cli("jobs", verb, "-h").out, "help has an example"
    for name in ("worker", "migrate", "queues", "doctor", "health"):
        assert f"\n  dbqueue {name} " in cli(name, "-h").out
    for group in ([], ["jobs"]):  # an error since click 8.2
        assert "Usage: " in "".join(cli(*group)[1:])
