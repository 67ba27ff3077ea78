"""`dbqueue doctor`: every check fails for the reason that it names, and a healthy database has none."""

from __future__ import annotations

import importlib
import os
import re
import socket
import sqlite3
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import psycopg
import pytest

from dbqueue import DBQueue, doctor
from dbqueue.cli import output
from dbqueue.clock import SECOND
from dbqueue.database import migrate
from dbqueue.database.engine import Database
from dbqueue.database.sqlite import Sqlite
from dbqueue.doctor import catalog, jobs, pooler, postgres, schema, sqlite
from dbqueue.errors import ConfigError
from dbqueue.states import State
from tests.bouncer import bounced
from tests.doors.conftest import Answer, Run
from tests.doors.test_cli_app import FOREIGN, distribution
from tests.doors.test_cli_migrate import run_sql
from tests.factory import make
from tests.golden import Golden
from tests.schema_dump import dump
from tests.servers import Server
from tests.waiting import wait_for

POSTGRES = pytest.mark.databases("postgres")
SQLITE = pytest.mark.databases("sqlite")
EVERYWHERE = pytest.mark.databases("sqlite", "postgres", "postgres15")

APP = """
from dataclasses import dataclass
from dbqueue import DBQueue
queue = DBQueue("{url}"{options})

@dataclass(frozen=True)
class Mail:
    to: str{field}

@queue.job(max_attempts=3, timeout={timeout}, queue="mail")
def send(mail: Mail) -> None: ...
"""


class Look(Protocol):
    def __call__(self, *words: object, url: str = ...) -> dict[str, Any]: ...


@pytest.fixture
def look(cli: Run, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Look:
    """The findings by name, of this database unless another URL is given; `status` and `code` beside them."""

    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*words: object, url: str = database_url) -> dict[str, Any]:
        for name in ("shop", "inner"):
            sys.modules.pop(name, None)
        answer = cli("doctor", *(words if "-A" in words else ("--url", url, *words)), "--json")
        assert answer.err == "", answer
        document = answer.json
        found = {check["name"]: check for check in document["checks"]}
        assert len(found) == len(document["checks"]), "names are unique"
        return found | {"code": answer.code, "status": document["status"], "database": document["database"]}

    return run


def not_ok(found: dict[str, Any]) -> dict[str, str]:
    checks = {name: check for name, check in found.items() if isinstance(check, dict)}
    assert all((check["remedy"] is None) == (check["status"] == "ok") for check in checks.values())
    return {name: check["status"] for name, check in checks.items() if check["status"] != "ok"}


def imported(name: str) -> Any:
    """The module as a program of its own would have it: the next import reads the file again."""
    sys.modules.pop(name, None)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def write_app(url: str, *, field: str = "", timeout: float = 30, options: str = "", name: str = "shop") -> None:
    field = f"\n    {field}" if field else ""
    Path(f"{name}.py").write_text(APP.format(url=url, field=field, timeout=timeout, options=options))


def with_options(url: str, **settings: str) -> str:
    options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items())
    return f"{url}?options={quote(options)}"


# -- healthy -----------------------------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.req("D6")
def test_a_fresh_database_is_healthy(cli: Run, look: Look, database_url: str, queue: DBQueue) -> None:
    write_app(database_url)
    for words in ([], ["-A", "shop"]):
        found = look(*words)
        assert (not_ok(found), found["status"], found["code"]) == ({}, "ok", 0)
        assert ("targets" in found, "lease_rule" in found) == (bool(words), bool(words))
    assert found["database"] == queue.database.label
    code, out, err = cli("doctor", "--url", database_url)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == ["ok"] * (len(found) - 5)
    assert max(map(len, out.splitlines())) <= output.WIDTH


def test_looking_changes_nothing(look: Look, database_url: str, queue: DBQueue, database: str) -> None:
    job_id = queue.send("mail", {}).id
    before = dump(queue.database), queue.get_job(job_id), queue.counts()
    look()
    assert (dump(queue.database), queue.get_job(job_id), queue.counts()) == before
    if database == "postgres":
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        with psycopg.connect(database_url) as connection:
            assert connection.execute(held).fetchone() == (0,)


@pytest.mark.databases("postgres", "postgres15")
@pytest.mark.req("D6")
def test_the_shipped_description_is_what_the_migrations_make(database_url: str, queue: DBQueue, golden: Golden) -> None:
    """On every version, wherever the tables lie, and whatever else lies there."""
    path = Path(migrate.__file__).parent / "migrations" / "postgres" / schema.DESCRIPTION
    names = queue.database.dialect.names
    with queue.database.session() as session:
        golden.check(path, schema.to_text(catalog.postgres(session, names)))
        items = schema.shipped("postgres")
        assert schema.to_text(items) == path.read_text()
    elsewhere = Database(database_url, schema="own", prefix="q_")
    elsewhere.ready()
    run_sql(database_url, "CREATE TABLE dbqueue_neighbour (id int); CREATE TABLE own.q_jobs_old (LIKE own.q_jobs)")
    for database in (queue.database, elsewhere):
        with database.session() as session:
            found = catalog.postgres(session, database.dialect.names, catalog.table_names(items))
            assert schema.compare(items, found) == []
    elsewhere.close()


# -- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.req("D6")
def test_a_missing_or_other_schema_is_told_as_everywhere(cli: Run, database_url: str) -> None:
    def answered() -> tuple[int, str, str]:
        answer = cli("doctor", "--url", database_url, "--json")
        return answer.code, answer.out, answer.error["error"]

    assert answered() == (4, "", "schema_missing")
    assert cli("migrate", "--url", database_url).code == 0
    newest = "version = (SELECT max(version) FROM dbqueue_migrations)"
    for change, error in (("DELETE FROM", "schema_outdated"), ("UPDATE", "schema_too_new")):
        run_sql(
            database_url,
            f"{change} dbqueue_migrations {'SET version = 99' if change == 'UPDATE' else ''} WHERE {newest}",
        )
        assert answered() == (4, "", error)


def test_an_unreachable_database_is_told_as_everywhere(cli: Run) -> None:
    answer: Answer = cli("doctor", "--url", "postgresql://app@127.0.0.1:1/shop", "--json")
    assert (answer.code, answer.out, answer.error["error"]) == (3, "", "connection_lost")


@POSTGRES
def test_warnings_leave_0_and_failures_1(cli: Run, database_url: str, queue: DBQueue) -> None:
    make(queue.database, State.DEAD)
    code, out, _ = cli("doctor", "--url", database_url)
    assert code == 0
    assert "warning  held_jobs" in out
    assert "-> `dbqueue jobs list --state dead`" in out
    run_sql(database_url, "DROP INDEX dbqueue_jobs_claim")
    assert cli("doctor", "--url", database_url).code == 1


@SQLITE
def test_a_foreign_distribution(
    cli: Run, process: Run, database_url: str, queue: DBQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, *FOREIGN[1])
    assert process("doctor", "--url", database_url).code == 2, "the command itself already refuses"
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = cli("doctor", "--url", database_url)
    assert code == 1
    assert "failure  distribution" in out
    assert "-> pip uninstall -y other-queue" in " ".join(out.split())


def test_old_pythons_and_libraries(look: Look, queue: DBQueue, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    assert jobs.python((3, 9, 2)).status == "failure"
    if database == "sqlite":
        monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 23, 1))
        assert not_ok(look()) == {"sqlite": "failure"}
    else:
        monkeypatch.setattr(postgres, "OLDEST_SERVER", 200_000)
        assert not_ok(look()) == {"server": "failure"}


# -- the schema --------------------------------------------------------------------------------------------------------

DRIFT_ANYWHERE = [
    ("DROP INDEX dbqueue_jobs_claim", "indexes", "failure", "index jobs_claim is missing"),
    ("DROP INDEX dbqueue_jobs_key", "indexes", "failure", "index jobs_key is missing (UNIQUE"),
    (
        "DROP INDEX dbqueue_jobs_lease; CREATE INDEX dbqueue_jobs_lease ON dbqueue_jobs (lease_until)",
        "indexes", "failure", "index jobs_lease is ",
    ),
    ("DROP INDEX dbqueue_jobs_task; CREATE INDEX mine ON dbqueue_jobs (task_id) WHERE task_id IS NOT NULL", "", "", ""),
    ("CREATE INDEX mine ON dbqueue_jobs (worker)", "", "", ""),
    ("CREATE UNIQUE INDEX mine ON dbqueue_jobs (queue)", "indexes", "warning", "index mine is not dbqueue's"),
    ("DROP INDEX dbqueue_jobs_expires", "indexes", "failure", "index jobs_expires is missing"),
    ("DROP INDEX dbqueue_bindings_queue", "indexes", "failure", "index bindings_queue is missing"),
    ("DROP INDEX dbqueue_consumers_queue", "indexes", "failure", "index consumers_queue is missing"),
    ("ALTER TABLE dbqueue_jobs ADD COLUMN note text", "tables", "warning", "column jobs.note is not dbqueue's"),
    ("ALTER TABLE dbqueue_queues ADD COLUMN note text", "tables", "warning", "column queues.note is not dbqueue's"),
    ("DROP VIEW dbqueue_all_jobs", "tables", "failure", "view all_jobs is missing"),
]  # fmt: skip
DRIFT_POSTGRES = [
    ("ALTER TABLE dbqueue_jobs ALTER source SET NOT NULL", "tables", "failure",
     "column jobs.source is text NOT NULL, it should be text"),
    ("ALTER TABLE dbqueue_jobs ALTER source TYPE varchar(20)", "tables", "failure", "is character varying(20)"),
    ("ALTER TABLE dbqueue_jobs ALTER lapses DROP DEFAULT", "tables", "failure", "should be integer NOT NULL DEFAULT 0"),
    ("ALTER TABLE dbqueue_jobs DROP COLUMN sequence", "tables", "failure", "column jobs.sequence is missing"),
    ("ALTER TABLE dbqueue_jobs ADD COLUMN note text NOT NULL", "tables", "failure", "jobs.note is not dbqueue's"),
    ("ALTER TABLE dbqueue_jobs ADD COLUMN note text NOT NULL DEFAULT ''", "tables", "warning", "column jobs.note"),
    ("ALTER TABLE dbqueue_jobs DROP CONSTRAINT dbqueue_running_has_lease", "tables", "failure",
     "constraint running_has_lease is missing"),
    ("ALTER TABLE dbqueue_finished DROP CONSTRAINT dbqueue_finished_pkey", "tables", "failure", "PRIMARY KEY"),
    ("ALTER TABLE dbqueue_jobs ADD CONSTRAINT mine CHECK (queue <> 'x')", "tables", "warning", "constraint mine"),
    ("ALTER TABLE dbqueue_jobs SET UNLOGGED", "tables", "failure", "table jobs is unlogged, it should be permanent"),
    ("ALTER TABLE dbqueue_mail SET LOGGED", "tables", "warning", "table mail is permanent, it should be unlogged"),
    ("ALTER TABLE dbqueue_bindings DROP CONSTRAINT dbqueue_bindings_pkey", "tables", "failure", "PRIMARY KEY"),
    ("ALTER TABLE dbqueue_queues ALTER brief DROP NOT NULL", "tables", "failure", "column queues.brief is boolean"),
    ("DROP SEQUENCE dbqueue_mail_ids", "tables", "failure", "sequence mail_ids is missing"),
    ("ALTER TABLE dbqueue_jobs ENABLE ROW LEVEL SECURITY", "tables", "failure", "with row security"),
    ("ALTER TABLE dbqueue_jobs RESET (fillfactor)", "tables", "warning", "option fillfactor is missing (70)"),
    ("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
     "CREATE TRIGGER mine BEFORE INSERT ON dbqueue_jobs FOR EACH ROW EXECUTE FUNCTION f()", "tables", "warning",
     "trigger mine is not dbqueue's"),
]  # fmt: skip
DRIFT_SQLITE = [
    ("ALTER TABLE dbqueue_jobs ADD COLUMN note TEXT NOT NULL DEFAULT ''", "tables", "warning", "column jobs.note"),
    ("PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = replace(sql, 'source TEXT,', 'source TEXT NOT NULL,')"
     " WHERE name = 'dbqueue_jobs'", "tables", "failure",
     "column jobs.source is TEXT NOT NULL, it should be TEXT"),
    ("PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = replace(sql, 'sequence INTEGER', 'sequence TEXT')"
     " WHERE name = 'dbqueue_jobs'", "tables", "failure", "column jobs.sequence is TEXT"),
    ("PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = replace(sql, 'ready_at IS NULL OR state = 0', '1')"
     " WHERE name = 'dbqueue_jobs'", "tables", "failure", "CHECK (1)"),
    ("CREATE TRIGGER mine BEFORE INSERT ON dbqueue_jobs BEGIN SELECT 1; END", "tables", "warning", "trigger mine"),
]  # fmt: skip


def _drift(script: str, name: str, status: str, told: str, look: Look, url: str) -> None:
    run_sql(url, script)
    found = look()
    assert not_ok(found) == ({name: status} if name else {})
    assert not name or told in found[name]["sentence"], found[name]
    assert found["code"] == int(status == "failure")
    if (name, status) == ("indexes", "failure"):
        run_sql(url, found[name]["remedy"])
        assert not_ok(look()) == {}, "the remedy cures it"


@pytest.mark.req("D6")
@pytest.mark.parametrize(("script", "name", "status", "told"), DRIFT_ANYWHERE, ids=[d[0][:60] for d in DRIFT_ANYWHERE])
def test_drift(script: str, name: str, status: str, told: str, look: Look, database_url: str, queue: DBQueue) -> None:
    _drift(script, name, status, told, look, database_url)


@POSTGRES
@pytest.mark.req("D6")
@pytest.mark.parametrize(("script", "name", "status", "told"), DRIFT_POSTGRES, ids=[d[0][:70] for d in DRIFT_POSTGRES])
def test_drift_on_postgres(
    script: str, name: str, status: str, told: str, look: Look, database_url: str, queue: DBQueue
) -> None:
    _drift(script, name, status, told, look, database_url)


@SQLITE
@pytest.mark.req("D6")
@pytest.mark.parametrize(("script", "name", "status", "told"), DRIFT_SQLITE, ids=[d[3] for d in DRIFT_SQLITE])
def test_drift_on_sqlite(
    script: str, name: str, status: str, told: str, look: Look, database_url: str, queue: DBQueue
) -> None:
    queue.close()
    _drift(script, name, status, told, look, database_url)


@pytest.mark.req("D6")
def test_a_table_that_is_gone(look: Look, database_url: str, queue: DBQueue) -> None:
    """What stands on it cannot be looked at, and the rest still is."""
    run_sql(database_url, "DROP VIEW dbqueue_all_jobs; DROP TABLE dbqueue_finished")
    found = look()
    assert not_ok(found) == {"tables": "failure", "held_jobs": "warning"}
    assert "table finished is missing" in found["tables"]["sentence"]
    assert "could not be looked at" in found["held_jobs"]["sentence"]


@POSTGRES
def test_an_index_that_is_not_valid(look: Look, database_url: str, queue: DBQueue) -> None:
    run_sql(database_url, "DROP INDEX dbqueue_jobs_key")
    for _ in range(2):
        make(queue.database, key="k")
    with psycopg.connect(database_url, autocommit=True) as connection, pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute(
            "CREATE UNIQUE INDEX CONCURRENTLY dbqueue_jobs_key ON dbqueue_jobs (target, key) "
            "WHERE key IS NOT NULL AND state IN (0, 1, 3)",
        )
    found = look("--patience", 7200)
    assert not_ok(found) == {"indexes": "failure"}
    assert "dbqueue_jobs_key is not valid" in found["indexes"]["sentence"]
    assert found["indexes"]["remedy"] == 'REINDEX INDEX CONCURRENTLY "public"."dbqueue_jobs_key";'


# -- what the jobs tell ------------------------------------------------------------------------------------------------


@pytest.mark.req("D12")
def test_leases_that_nobody_takes_back(look: Look, queue: DBQueue) -> None:
    database = queue.database
    with database.session() as session:
        now = database.dialect.now(session)
    make(database, State.RUNNING, lease_until=now - 10 * SECOND)
    assert not_ok(look()) == {}, "a moment ago: a worker is about to see it"
    make(database, State.RUNNING, lease_until=now - 300 * SECOND)
    found = look()
    assert not_ok(found) == {"leases": "failure"}
    assert re.match(
        r"1 running job lost the lease and nobody took it back, the oldest 3\d\d s", found["leases"]["sentence"]
    )
    assert look("--patience", 600)["leases"]["status"] == "ok"
    assert look("--patience", 5)["leases"]["sentence"].startswith("2 running jobs")


def test_due_jobs_that_nobody_wants(look: Look, queue: DBQueue) -> None:
    database = queue.database
    make(database, queue="alone")
    make(database, queue="behind")
    make(database, State.RUNNING, queue="behind")
    found = look()
    assert not_ok(found) == {"due_jobs": "warning"}
    assert "queue 'alone': 1 job ready, the oldest for 3600 s, none running" in found["due_jobs"]["sentence"]
    assert "queue 'behind': 1 job ready, the oldest for 3600 s, 1 running" in found["due_jobs"]["sentence"]
    assert "start a worker with -Q alone" in found["due_jobs"]["remedy"]
    make(database, queue="late", ready_at=None)
    found = look()
    assert not_ok(found) == {"due_jobs": "failure"}
    assert "1 job became due more than 60 s ago and nobody made them claimable" in found["due_jobs"]["sentence"]


def test_a_worker_cures_it(look: Look, queue: DBQueue, process: Run, database_url: str) -> None:
    database = queue.database
    with database.session() as session:
        now = database.dialect.now(session)
    make(database, State.RUNNING, target="shop.send", queue="mail", lease_until=now - 300 * SECOND, max_attempts=1)
    make(database, target="shop.send", queue="mail", ready_at=None)
    assert not_ok(look()) == {"leases": "failure", "due_jobs": "failure"}
    write_app(database_url)
    assert process("worker", "-A", "shop", "--once").code == 0
    assert not_ok(look()) == {"held_jobs": "warning"}, (
        "the lost one is dead, the due one blocked: it is of another schema"
    )


def test_jobs_that_wait_for_a_decision(look: Look, queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    for state in (State.BLOCKED, State.UNKNOWN, State.DEAD, State.DEAD):
        make(queue.database, state)
    found = look()
    assert not_ok(found) == {"held_jobs": "warning"}
    assert found["held_jobs"]["sentence"] == "1 blocked; 1 unknown; 2 dead"
    assert "dbqueue jobs resolve" in found["held_jobs"]["remedy"]
    monkeypatch.setattr(jobs, "MOST_COUNTED", 1)
    assert look()["held_jobs"]["sentence"] == "1 blocked; 1 unknown; more than 1 dead"


@pytest.mark.req("D9")
def test_stored_jobs_that_this_code_cannot_run(look: Look, queue: DBQueue, database_url: str) -> None:
    write_app(database_url)
    shop = imported("shop")
    for _ in range(2):
        shop.send.enqueue(shop.Mail("a@example.org"))
    shop.queue.send("raw", {})
    shop.queue.close()
    found = look("-A", "shop")
    assert not_ok(found) == {}
    assert found["targets"]["sentence"] == "all 2 pending or running jobs can run; declared: shop.send"
    make(queue.database, State.BLOCKED, target="shop.send")
    found = look("-A", "shop")
    assert not_ok(found) == {"held_jobs": "warning"}
    assert found["targets"]["sentence"] == (
        "all 2 pending or running jobs can run, beside 1 blocked (see held_jobs); declared: shop.send"
    )
    queue.cancel(queue.jobs(state="blocked")[0].id)
    make(queue.database, target="shop.gone")
    found = look("-A", "shop", "--patience", 7200)
    assert not_ok(found) == {"targets": "warning"}
    assert found["targets"]["sentence"] == "1 job of target 'shop.gone', which this code does not declare"
    write_app(database_url, field="subject: str", name="inner")
    Path("inner.py").write_text(Path("inner.py").read_text().replace('queue="mail"', 'queue="mail", name="shop.send"'))
    found = look("-A", "inner", "--patience", 7200)
    assert not_ok(found) == {"targets": "failure"}
    assert found["targets"]["sentence"].startswith("2 jobs of target 'shop.send' with another schema")


@pytest.mark.req("D18")
def test_a_lease_shorter_than_a_timeout(look: Look, queue: DBQueue, database_url: str, database: str) -> None:
    write_app(database_url, options=", lease=10")
    found = look("-A", "shop")
    assert not_ok(found) == ({"lease_rule": "failure"} if database == "sqlite" else {})
    if database == "sqlite":
        assert "lease_ms is 10000, but on SQLite it must exceed" in found["lease_rule"]["sentence"]
        make(queue.database, target="inner.send", timeout_ms=20_000)
        write_app(database_url, options=", lease=10", timeout=5, name="inner")
        found = look("-A", "inner", "--patience", 7200)
        assert found["targets"]["sentence"] == (
            "1 job of target 'inner.send' with a timeout beyond the lease: they would be blocked"
        )


@POSTGRES
@pytest.mark.req("H14")
def test_clocks_that_differ(look: Look, queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    for shift, told in ((7200.0, "7200.0 s behind this machine's"), (-7200.0, "7200.0 s ahead of this machine's")):
        monkeypatch.setattr(jobs.time, "time", lambda shift=shift: real() + shift)
        found = look()
        assert not_ok(found) == {"clock": "warning"}
        assert told in found["clock"]["sentence"]
        assert queue.send("mail", {}).duplicate is False, "which nothing here minds"
        claimed = queue.claim("mail", "me")
        assert claimed is not None
        claimed.ack()


# -- PostgreSQL: the session and its rights ----------------------------------------------------------------------------


@POSTGRES
@pytest.mark.parametrize(
    ("settings", "status", "told"),
    [
        ({"default_transaction_isolation": "serializable"}, "warning", "default_transaction_isolation is serializable"),
        ({"default_transaction_read_only": "on"}, "failure", "nothing can be written"),
        ({"statement_timeout": "100ms"}, "warning", "statement_timeout is 100 ms"),
        ({"lock_timeout": "20ms"}, "warning", "lock_timeout is 20 ms"),
        ({"idle_in_transaction_session_timeout": "50ms"}, "warning", "idle_in_transaction_session_timeout is 50 ms"),
        ({"idle_session_timeout": "10s"}, "warning", "idle_session_timeout is 10000 ms"),
        ({"synchronous_commit": "off"}, "warning", "synchronous_commit is off"),
        ({"statement_timeout": "30s", "lock_timeout": "5s", "idle_in_transaction_session_timeout": "10min"}, "", ""),
    ],
    ids=str,
)
def test_defaults_of_the_session(
    look: Look, database_url: str, queue: DBQueue, settings: dict[str, str], status: str, told: str
) -> None:
    found = look(url=with_options(database_url, **settings))
    assert not_ok(found) == ({"session": status} if status else {})
    assert told in found["session"]["sentence"]


@pytest.fixture
def make_role(postgres: Server, database_url: str) -> Iterator[Callable[..., str]]:
    """Makes a role with these attributes and rights, and returns its URL."""
    made = []

    def make_one(*grants: str, attributes: str = "") -> str:
        name = f"doctor_{len(made)}_{os.getpid()}"
        made.append(name)
        run_sql(database_url, f"CREATE ROLE {name} LOGIN PASSWORD 'x' {attributes}")
        for grant in grants:
            run_sql(database_url, f"GRANT {grant} TO {name}")
        parts = urlsplit(database_url)
        return parts._replace(netloc=f"{name}:x@{parts.hostname}:{parts.port}").geturl()

    yield make_one
    for name in made:
        run_sql(database_url, f"DROP OWNED BY {name}; DROP ROLE {name}")


@POSTGRES
def test_rights_that_are_missing(look: Look, queue: DBQueue, make_role: Callable[..., str]) -> None:
    url = make_role()
    found = look(url=url)
    assert not_ok(found) == {"privileges": "failure"}
    assert "schema" not in found, "without the right to look there is nothing to look at"
    user = urlsplit(url).username
    assert f'GRANT SELECT, INSERT, UPDATE, DELETE ON public.dbqueue_jobs TO "{user}";' in found["privileges"]["remedy"]
    for statement in found["privileges"]["remedy"].split(";"):
        if statement.strip():
            run_sql(queue.database.url.render_as_string(hide_password=False), statement)
    assert not_ok(look(url=url)) == {}, "the remedy cures it"
    run_sql(queue.database.url.render_as_string(hide_password=False), f"REVOKE DELETE ON dbqueue_jobs FROM {user}")
    found = look(url=url)
    assert not_ok(found) == {"privileges": "failure"}
    assert "lacks: DELETE on dbqueue_jobs" in found["privileges"]["sentence"]
    assert not_ok(look("--role", "publisher", url=url)) == {}
    assert "lacks as a worker: DELETE on dbqueue_jobs" in look("--role", "worker", url=url)["privileges"]["sentence"]


@POSTGRES
def test_a_schema_that_may_not_be_used(look: Look, database_url: str, make_role: Callable[..., str]) -> None:
    own = DBQueue(database_url, schema="own")
    own.migrate()
    own.close()
    url = make_role("SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA own")
    found = look(url=f"{url}?schema=own")
    assert not_ok(found) == {"privileges": "failure"}
    assert found["privileges"]["remedy"].startswith('GRANT USAGE ON SCHEMA own TO "doctor_0')


@POSTGRES
def test_a_user_with_few_connections(
    look: Look, queue: DBQueue, make_role: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public"
    url = make_role(every, "USAGE ON ALL SEQUENCES IN SCHEMA public", attributes="CONNECTION LIMIT 6")
    found = look(url=url)
    assert not_ok(found) == {"connections": "warning"}
    assert found["connections"]["sentence"].endswith("room for 6 more, but a worker with 4 slots may take 7")
    monkeypatch.setenv("DBQUEUE_WORKERS", "3")
    # The connection of the look before may be about to end still.
    wait_for(lambda: not_ok(look(url=url)) == {}, message="room for three slots was not seen")
    monkeypatch.setenv("DBQUEUE_WORKERS", "500")
    found = look()
    assert not_ok(found) == {"connections": "warning"}
    assert "max_connections = 200" in found["connections"]["sentence"]


@POSTGRES
def test_somebody_who_holds_a_lock_is_not_waited_for(
    look: Look, database_url: str, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LOCK_TIMEOUT", "50ms")
    with psycopg.connect(database_url) as holder:
        holder.execute("LOCK TABLE dbqueue_jobs IN ACCESS EXCLUSIVE MODE")
        found = look()
    assert set(not_ok(found)) >= {"leases", "due_jobs"}
    assert set(not_ok(found).values()) == {"warning"}
    assert "DatabaseBusy" not in found["leases"]["sentence"]
    assert "LockNotAvailable 55P03" in found["leases"]["sentence"]


# -- PostgreSQL: vacuum ------------------------------------------------------------------------------------------------


@POSTGRES
@pytest.mark.parametrize("kind", ["snapshot", "write"])
def test_a_transaction_that_is_held_open(
    look: Look, database_url: str, queue: DBQueue, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(postgres, "HELD_S", 0.0)
    assert not_ok(look()) == {}
    with psycopg.connect(database_url, application_name="report") as holder:
        if kind == "snapshot":
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT 1 FROM dbqueue_jobs")
        else:
            holder.execute("CREATE TABLE mine ()")
        found = look()
        assert not_ok(found) == {"snapshots": "warning"}
        assert (
            f"session {holder.info.backend_pid} of postgres (report), idle in transaction"
            in found["snapshots"]["sentence"]
        )
        assert f"pg_terminate_backend({holder.info.backend_pid})" in found["snapshots"]["remedy"]
        monkeypatch.setattr(postgres, "HELD_S", 300.0)
        assert not_ok(look()) == {}, "for five minutes nobody complains"
        holder.rollback()


@POSTGRES
def test_a_replication_slot_that_nobody_uses(look: Look, postgres: Server, queue: DBQueue, database_url: str) -> None:
    postgres.execute("SELECT pg_create_physical_replication_slot('doctor', true)")
    try:
        assert not_ok(look()) == {}, "it keeps log, but no rows"
        feedback(database_url, "doctor")
        found = look()
        assert not_ok(found) == {"snapshots": "warning"}
        assert "replication slot doctor, which nobody uses" in found["snapshots"]["sentence"]
        assert "pg_drop_replication_slot('doctor')" in found["snapshots"]["remedy"]
    finally:
        postgres.execute("SELECT pg_drop_replication_slot('doctor')")


def feedback(url: str, slot: str) -> None:
    """Says what a standby with hot_standby_feedback says, and goes away."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("SELECT pg_current_wal_lsn(), pg_current_xact_id()::text::bigint").fetchone()
    assert found is not None
    lsn, xid = found
    with closing(psycopg.connect(url, autocommit=True, replication="true")) as connection:
        wire = connection.pgconn
        wire.send_query(f"START_REPLICATION SLOT {slot} PHYSICAL {lsn}".encode())
        wire.flush()
        while wire.is_busy():
            wire.consume_input()
        wire.get_result()
        wire.put_copy_data(struct.pack("!cqIIII", b"h", 0, xid % 2**32, 0, 0, 0))
        wire.flush()
        held = "SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = %s"
        with psycopg.connect(url, autocommit=True) as looking:
            wait_for(lambda: looking.execute(held, (slot,)).fetchone() == (True,))
    with psycopg.connect(url, autocommit=True) as looking:
        free = "SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s"
        wait_for(lambda: looking.execute(free, (slot,)).fetchone() == (True,))


@POSTGRES
def test_dead_rows(look: Look, database_url: str, queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "DEAD_ROWS", 100)
    run_sql(database_url, "ALTER TABLE dbqueue_jobs SET (autovacuum_enabled = false)")
    found = look()
    assert not_ok(found) == {"autovacuum": "failure", "tables": "warning"}
    assert found["autovacuum"]["remedy"] == "ALTER TABLE dbqueue_jobs RESET (autovacuum_enabled);"
    make(queue.database)
    dead = "DO $$ BEGIN FOR i IN 1..150 LOOP UPDATE dbqueue_jobs SET worker = i; END LOOP; END $$"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(dead)

    def seen() -> dict[str, Any] | None:
        found = look("--patience", 7200)
        return found if "dead_rows" in not_ok(found) else None

    found = wait_for(seen)
    assert "rows and 150 dead ones" in found["dead_rows"]["sentence"]
    assert "vacuumed never" in found["dead_rows"]["sentence"]
    run_sql(database_url, "VACUUM dbqueue_jobs")
    assert wait_for(lambda: look("--patience", 7200)["dead_rows"]["status"] == "ok")


@POSTGRES
def test_a_server_of_another_kind(
    cli: Run, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No autovacuum, few connections, a prepared transaction; then a standby."""
    server = make_server(18, autovacuum="off", max_connections="12", max_prepared_transactions="2")
    run_sql(server.dsn(), "CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0")
    url = server.dsn("ascii")
    queue = DBQueue(url)
    queue.migrate()
    queue.close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE mine ()")
        connection.execute("PREPARE TRANSACTION 'left over'")
    monkeypatch.setattr(postgres, "HELD_S", 0.0)
    monkeypatch.setenv("DBQUEUE_WORKERS", "9")
    checks = {check["name"]: check for check in cli("doctor", "--url", url, "--json").json["checks"]}
    assert not_ok(checks) == {
        "server": "warning", "autovacuum": "failure", "snapshots": "warning", "connections": "warning",
    }  # fmt: skip
    assert "encoding is SQL_ASCII" in checks["server"]["sentence"]
    assert "prepared transaction 'left over' of postgres" in checks["snapshots"]["sentence"]
    assert "ROLLBACK PREPARED" in checks["snapshots"]["remedy"]
    run_sql(url, "ROLLBACK PREPARED 'left over'")
    server.stop()
    (server.home / "data" / "standby.signal").touch()
    server._process = server._spawn()  # `start` waits for a server that can be written to
    wait_for(lambda: accepts(server.port) and reads(url))
    answer = cli("doctor", "--url", url, "--json")
    checks = {check["name"]: check for check in answer.json["checks"]}
    assert answer.code == 1
    assert not_ok(checks) == {"server": "failure"}
    assert "is a standby" in checks["server"]["sentence"]


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def reads(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


# -- PostgreSQL: waking up, and poolers --------------------------------------------------------------------------------


@POSTGRES
@pytest.mark.req("D17")
def test_notifications(
    look: Look, database_url: str, make_database_url: Callable[[], str], queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "a notification took" in look()["notify"]["sentence"]
    write_app(database_url, options=", notify=False, poll=0.5")
    found = look("-A", "shop")
    assert not_ok(found) == {}
    assert found["notify"]["sentence"] == "switched off: workers look for jobs every 500 ms"
    write_app(database_url, options=f", listen_url={make_database_url()!r}", name="inner")
    found = look("-A", "inner")
    assert not_ok(found) == {"notify": "warning"}, "another database: locks and channels are its own"
    assert "lock did not hold" in found["notify"]["sentence"]
    assert "let listen_url lead to this very server" in found["notify"]["remedy"]
    write_app(database_url, options=", listen_url='postgresql://u:p4ssw0rd@127.0.0.1:1/shop'", name="shop")
    found = look("-A", "shop")
    assert not_ok(found) == {"notify": "warning"}
    assert "listen_url cannot be reached" in found["notify"]["sentence"]
    assert "p4ssw0rd" not in str(found)


@POSTGRES
def test_a_pooler_in_session_mode(look: Look, database_url: str, queue: DBQueue) -> None:
    with bounced(database_url, "session") as url:
        found = look(url=url)
    assert not_ok(found) == {}
    assert found["pooler"]["sentence"] == "a pooler in session mode"


@POSTGRES
def test_a_pooler_in_transaction_mode(look: Look, database_url: str, queue: DBQueue) -> None:
    with bounced(database_url, "transaction") as url:
        found = look(url=url)
        assert not_ok(found) == {"pooler": "failure", "notify": "warning"}
        assert "loses prepared statements (DuplicatePreparedStatement)" in found["pooler"]["sentence"]
        assert "listen_url" in found["notify"]["remedy"]
        write_app(f"{url}?pgbouncer=true", options=f", listen_url={database_url!r}")
        assert not_ok(look("-A", "shop")) == {}, "the remedies cure it"
        write_app(database_url, options=f", listen_url={url!r}", name="inner")
        found = look("-A", "inner")
        assert not_ok(found) == {"notify": "warning"}
        assert "LISTEN was accepted, but no notification arrived" in found["notify"]["sentence"]


@POSTGRES
def test_the_remedy_for_a_pooler_works(database_url: str, queue: DBQueue, process: Run) -> None:
    """What a publisher and a worker send through it, more often than it takes to prepare a statement."""
    with bounced(database_url, "transaction") as url:
        write_app(f"{url}?pgbouncer=true", options=f", listen_url={database_url!r}")
        shop = imported("shop")
        for number in range(20):
            shop.send.enqueue(shop.Mail(str(number)))
        shop.queue.close()
        answer = process("worker", "-A", "shop", "--once", "-c", "3")
        assert answer.code == 0, answer.err
        assert "WARNING" not in answer.err
    assert queue.counts() == {"succeeded": 20}


@POSTGRES
def test_a_pooler_in_statement_mode_and_one_that_is_too_small(
    look: Look, database_url: str, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bounced(database_url, "statement") as url:
        found = look(url=url)
    assert not_ok(found) == {"pooler": "failure"}
    assert "statement mode" in found["pooler"]["sentence"]
    monkeypatch.setattr(pooler, "ANSWER_WITHIN", 0.3)
    with bounced(database_url, "session", "default_pool_size = 1") as url:
        found = look(url=url)
    assert not_ok(found) == {"pooler": "failure"}
    assert "got no answer within 0.3 s" in found["pooler"]["sentence"]
    assert "server" not in found, "nothing else can be said through it"


# -- SQLite: the file --------------------------------------------------------------------------------------------------

MOUNT_TABLE = """\
overlay / overlay rw,relatime 0 0
proc /proc proc rw 0 0
/dev/sda1 /srv ext4 rw 0 0
nas:/vol /srv/shared nfs4 rw,vers=4.2 0 0
//nas/x /srv/with\\040blank cifs rw 0 0
host /srv/over 9p rw 0 0
tmpfs /srv/over tmpfs rw 0 0
me@h: /srv/h\\303\\266me fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/a.db", "overlay"),
        ("/srv/a.db", "ext4"),
        ("/srv/sharedx/a.db", "ext4"),
        ("/srv/shared/a.db", "nfs4"),
        ("/srv/shared/deep/a.db", "nfs4"),
        ("/srv/with blank/a.db", "cifs"),
        ("/srv/over/a.db", "tmpfs"),
        ("/srv/höme/a.db", "fuse.sshfs"),
    ],
)
def test_whose_file_system(path: str, kind: str) -> None:
    assert sqlite.file_system_of(path, MOUNT_TABLE) == kind
    assert (kind in sqlite.NETWORK) == (kind in ("nfs4", "cifs", "fuse.sshfs"))
    assert sqlite.file_system_of(path, "") is None


@SQLITE
@pytest.mark.req("D18")
def test_a_network_file_system(look: Look, queue: DBQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(sqlite, "MOUNTS", mounts)
    assert "was not looked at" in look()["file_system"]["sentence"]
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nnas:/vol {tmp_path} nfs rw 0 0\n")
    found = look()
    assert not_ok(found) == {"file_system": "failure"}
    assert "lies on nfs" in found["file_system"]["sentence"]
    mounts.write_text(f"host {tmp_path} virtiofs rw 0 0\n")
    assert not_ok(look()) == {"file_system": "warning"}


@contextmanager
def as_nobody() -> Iterator[None]:
    """To root, every file is writable."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_to(look: Look) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "queue.db"
        queue = DBQueue(f"sqlite:///{path}")
        queue.migrate()
        queue.close()
        path.chmod(0o666)
        assert not_ok(look(url=f"sqlite:///{path}")) == {"file": "warning"}, "everybody may write"
        Path(folder).chmod(0o555)
        with as_nobody():
            found = look(url=f"sqlite:///{path}")
        Path(folder).chmod(0o755)
    assert not_ok(found) == {"file": "failure"}
    assert f"may not write to the folder {folder}" in found["file"]["sentence"]
    assert "journal" not in found, "no connection was tried"


@SQLITE
def test_files_of_several_users(look: Look, database_url: str, queue: DBQueue) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    log = Path(database_url.removeprefix("sqlite:///") + "-wal")
    assert log.exists()
    os.chown(log, 65534, 65534)
    found = look()
    assert not_ok(found) == {"file": "warning"}
    assert "different users (uid 0, 65534)" in found["file"]["sentence"]


@SQLITE
def test_a_file_without_a_log(look: Look, queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("this SQLite database cannot use write-ahead logging; put the file on a local disk")

    monkeypatch.setattr(Sqlite, "_prepare", refuse)
    found = look()
    assert not_ok(found) == {"journal": "failure"}
    assert found["journal"]["remedy"] == "put the file on a local disk"


@SQLITE
def test_a_reader_that_keeps_the_log_growing(
    look: Look, database_url: str, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LARGE_WAL", 2**20)
    with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"), isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM dbqueue_jobs").fetchone()
        for _ in range(3):
            make(queue.database, payload=bytes(600_000), queue="big")
        found = look("--patience", 7200)
        assert not_ok(found) == {"wal": "warning"}
        assert "a reader keeps its transaction open" in found["wal"]["sentence"]
        reader.execute("COMMIT")
        found = look("--patience", 7200)
        assert "TRUNCATE" in found["wal"]["remedy"]
        reader.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert not_ok(look("--patience", 7200)) == {}


@SQLITE
def test_empty_pages(look: Look, queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "FREE_BYTES", 2**20)
    for _ in range(3):
        make(queue.database, State.SUCCEEDED, payload=bytes(600_000))
    assert not_ok(look()) == {}
    queue.purge(["succeeded"])
    found = look()
    assert not_ok(found) == {"free_pages": "warning"}
    assert "VACUUM" in found["free_pages"]["remedy"]


@SQLITE
def test_a_writer_that_does_not_end(
    look: Look, database_url: str, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LOCK_PATIENCE", 0.2)
    with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"), isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        found = look()
        assert not_ok(found) == {"write_lock": "warning"}
        writer.execute("ROLLBACK")
    assert not_ok(look()) == {}
