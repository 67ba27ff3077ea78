"""The schema: made once however many begin, the same by every road, never by halves, and never touched by older code (D6)."""

from __future__ import annotations

import inspect
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest

import dbqueue
from dbqueue import DBQueue, NotSupported, SchemaMissing, SchemaOutdated, SchemaTooNew
from dbqueue.database import migrate
from dbqueue.database.engine import Database
from dbqueue.database.migrate import Migration
from dbqueue.database.tables import SCHEMA_VERSION
from tests.golden import Golden
from tests.schema_dump import dump

ROOT = Path(__file__).parents[2]
everywhere = pytest.mark.databases("sqlite", "postgres", "postgres15")


@pytest.fixture
def open_database(database_url: str) -> Iterator[Callable[..., Database]]:
    opened: list[Database] = []

    def open_one(url: str = database_url, **options: Any) -> Database:
        opened.append(Database(url, **options))
        return opened[-1]

    yield open_one
    for database in opened:
        database.close()


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            return connection.execute(statement).fetchall()
    with psycopg.connect(url, autocommit=True) as server:
        cursor = server.execute(statement)
        return cursor.fetchall() if cursor.description else []


def versions(url: str) -> list[tuple[Any, ...]]:
    return execute(url, "SELECT version, name FROM dbqueue_migrations ORDER BY version")


# -- many at once ------------------------------------------------------------------------------------------------------

# Ten children of one process that has done the imports: ten interpreters would not start together on a small machine.
_STARTER = """
import os, sys, traceback
import psycopg
from dbqueue import DBQueue

queue = DBQueue(sys.argv[1])

@queue.job(max_attempts=1, timeout=1, name="tests.first")
def first() -> None: ...

gate, opener = os.pipe()
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        try:
            os.close(opener)
            os.read(gate, 1)  # returns when the parent closes its end
            first.enqueue()
            queue.close()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
print("ready", flush=True)
sys.stdin.readline()
os.close(opener)
print(sum(os.waitpid(child, 0)[1] == 0 for child in children))
"""


@contextmanager
def process_of(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `script`; it has said "ready" and waits for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.req("D6")
def test_ten_processes_start_at_once_on_an_empty_database(database_url: str) -> None:
    with process_of(_STARTER, database_url) as starter:
        out, errors = starter.communicate("go\n")
    assert (errors, out) == ("", "10\n")
    assert [version for version, _ in versions(database_url)] == list(range(1, SCHEMA_VERSION + 1))
    assert execute(database_url, "SELECT count(*) FROM dbqueue_meta") == [(1,)]
    assert execute(database_url, "SELECT count(*) FROM dbqueue_jobs") == [(10,)]


@pytest.mark.req("D6")
def test_migrating_again_does_nothing(database_url: str, open_database: Callable[..., Database]) -> None:
    database = open_database()
    assert [m.version for m in database.migrate()] == list(range(1, SCHEMA_VERSION + 1))
    identity = execute(database_url, "SELECT value FROM dbqueue_meta")
    assert open_database().migrate() == []
    assert database.pending_migrations() == []
    assert database.migration_script() == ""
    assert execute(database_url, "SELECT value FROM dbqueue_meta") == identity


# -- the same schema by every road -------------------------------------------------------------------------------------

_NEXT = Migration(SCHEMA_VERSION + 1, "synthetic", "CREATE TABLE dbqueue_synthetic (id bigint);\n")


@contextmanager
def known(
    monkeypatch: pytest.MonkeyPatch, listed: Callable[[str, Any], list[Migration]], newest: int
) -> Iterator[None]:
    """As code that knows these migrations."""
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "migrations", listed)
        patch.setattr(migrate, "SCHEMA_VERSION", newest)
        yield


@everywhere
@pytest.mark.req("D6")
def test_one_by_one_is_the_same_as_all_at_once(
    make_database_url: Callable[[], str], open_database: Callable[..., Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = migrate.migrations

    def with_next(name: str, names: Any) -> list[Migration]:
        return [*real(name, names), _NEXT]

    together, single = open_database(), open_database(make_database_url())
    newest = SCHEMA_VERSION + 1
    with known(monkeypatch, with_next, newest):
        assert len(together.migrate()) == newest
    for version in range(1, newest + 1):
        with known(monkeypatch, lambda name, names, v=version: with_next(name, names)[:v], newest):  # type: ignore[misc]
            assert [m.version for m in single.migrate()] == [version]
    assert dump(single) == dump(together)
    assert "dbqueue_synthetic" in dump(single)


@pytest.mark.req("D6")
def test_the_schema_is_the_one_in_the_golden_file(
    open_database: Callable[..., Database], database: str, golden: Golden
) -> None:
    fresh = open_database()
    fresh.migrate()
    golden.check(Path(__file__).with_name(f"{database}.sql"), dump(fresh))


@everywhere
@pytest.mark.req("D6")
def test_the_script_makes_the_same_schema(
    database_url: str, make_database_url: Callable[[], str], open_database: Callable[..., Database]
) -> None:
    """`migrate --sql`: the text runs as psql or the sqlite3 shell would run it."""
    by_script, migrated = open_database(), open_database(make_database_url())
    script = by_script.migration_script()
    if database_url.startswith("sqlite"):
        with closing(sqlite3.connect(database_url.removeprefix("sqlite:///"))) as connection:
            connection.executescript(script)
    else:
        execute(database_url, script)
    assert by_script.migration_script() == ""
    by_script.ready()
    assert by_script.migrate() == []
    migrated.migrate()
    assert dump(by_script) == dump(migrated)
    migrated.ready()
    assert by_script.database_id != migrated.database_id
    applied = execute(database_url, "SELECT version, name, applied_at > 1600000000000000 FROM dbqueue_migrations")
    assert [tuple(row) for row in applied] == [(m.version, m.name, True) for m in migrated_list(migrated)]


def migrated_list(database: Database) -> list[Migration]:
    return migrate.migrations(database.dialect.name, database.dialect.names)


@pytest.mark.databases("postgres", "postgres15")
@pytest.mark.req("D6")
def test_a_schema_of_its_own_is_created_once(database_url: str, open_database: Callable[..., Database]) -> None:
    first, second = open_database(schema="queues"), open_database(schema="other", prefix="q_")
    first.ready()
    second.ready()
    assert open_database(schema="queues").migrate() == []
    found = execute(database_url, "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE '%jobs' ORDER BY 1")
    assert found == [("other",), ("queues",)]
    assert first.database_id != second.database_id


# -- never by halves ---------------------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from dbqueue.database import migrate
from dbqueue.database.engine import Database

database = Database(sys.argv[1])
real = type(database.dialect).run_script
calls = []

def run_script(self, session, script):
    real(self, session, script)
    calls.append(script)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

type(database.dialect).run_script = run_script
print("ready", flush=True)
sys.stdin.readline()
database.migrate()
print(len(calls), flush=True)
"""


def run_killed(url: str, after: int) -> int | None:
    """Migrates in a process that is killed after so many scripts. Returns how many there were, if it was not."""
    with process_of(_KILLED, url, str(after)) as process:
        out, errors = process.communicate("go\n")
        assert errors == ""
        assert process.returncode == (0 if out else -signal.SIGKILL)
    return int(out) if out else None


@pytest.mark.req("D6")
def test_killed_in_the_middle_leaves_nothing(
    make_database_url: Callable[[], str], open_database: Callable[..., Database]
) -> None:
    url = make_database_url()
    total = run_killed(make_database_url(), 0)
    assert total
    for after in range(1, total + 1):
        assert run_killed(url, after) is None
        database = open_database(url)
        assert dump(database) == ""
        database.close()
    database = open_database(url)
    database.ready()
    assert versions(url)


@everywhere
@pytest.mark.req("D6")
def test_a_migration_that_fails_leaves_the_schema_as_it_was(
    database_url: str, open_database: Callable[..., Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database()
    database.migrate()
    before = dump(database)
    script = "CREATE TABLE dbqueue_half (id bigint);\nCREATE TABLE dbqueue_half (id bigint);\n"
    listed = [*migrated_list(database), Migration(SCHEMA_VERSION + 1, "broken", script)]
    with known(monkeypatch, lambda name, names: listed, SCHEMA_VERSION + 1), pytest.raises(dbqueue.DatabaseError):
        database.migrate()
    assert dump(database) == before
    assert len(versions(database_url)) == SCHEMA_VERSION
    assert database.migrate() == []


# -- newer, older, missing ---------------------------------------------------------------------------------------------

NOWHERE = uuid.UUID(int=1)
CALLS: dict[str, Callable[[DBQueue], object]] = {
    "send": lambda q: q.send("raw", {}),
    "claim": lambda q: q.claim("raw", "me"),
    "get_job": lambda q: q.get_job(NOWHERE),
    "jobs": lambda q: q.jobs(),
    "queues": lambda q: q.queues(),
    "counts": lambda q: q.counts(),
    "cancel": lambda q: q.cancel(NOWHERE),
    "retry": lambda q: q.retry(NOWHERE),
    "resolve": lambda q: q.resolve(NOWHERE, "discarded", datetime.now(timezone.utc)),
    "purge": lambda q: q.purge(["dead"]),
    "migrate": lambda q: q.migrate(),
    "schedule": lambda q: q.schedule("s", "* * * * *", "raw", {}),
    "unschedule": lambda q: q.unschedule("s"),
    "start_schedules": lambda q: q.start_schedules(),
    "adopt_schedules": lambda q: q.adopt_schedules(),
    "schedules": lambda q: q.schedules(),
    "get_schedule": lambda q: q.get_schedule("s"),
    "pause_schedule": lambda q: q.pause_schedule("s"),
    "resume_schedule": lambda q: q.resume_schedule("s"),
    "reset_schedule": lambda q: q.reset_schedule("s"),
    "run_schedule": lambda q: q.run_schedule("s"),
    "outbox": lambda q: q.outbox("receipts").run_once("me", print),
    "lock": lambda q: q.lock("report").acquire(),
}
WITHOUT_DATABASE = {
    "add", "adopt", "close", "database", "job", "options", "periodic", "rebound", "settings", "take", "targets", "write",
}  # fmt: skip


def test_every_public_call_is_known_here() -> None:
    public = {name for name, _ in inspect.getmembers(DBQueue) if not name.startswith("_")}
    assert public == set(CALLS) | WITHOUT_DATABASE


def target_of(queue: DBQueue) -> dbqueue.Target[None]:
    @queue.job(max_attempts=1, timeout=1, name="tests.only")
    def only() -> None: ...

    return only


def outcome(call: Callable[[DBQueue], object], queue: DBQueue) -> type[Exception] | None:
    try:
        call(queue)
    except Exception as error:
        return type(error)
    return None


def contents(url: str) -> list[Any]:
    names = ("jobs", "finished", "meta", "migrations")
    return [execute(url, f"SELECT * FROM dbqueue_{name}") for name in names]


@contextmanager
def callers_connection(url: str) -> Iterator[Any]:
    """A caller's connection in a transaction that has written."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
    else:
        with psycopg.connect(url) as connection:
            connection.execute("SELECT 1")
            yield connection
            connection.rollback()


@pytest.mark.req("D6")
def test_a_newer_schema_is_refused_by_every_call(database_url: str, open_database: Callable[..., Database]) -> None:
    open_database().migrate()
    execute(database_url, f"INSERT INTO dbqueue_migrations VALUES ({SCHEMA_VERSION + 1}, 'newer', 1)")
    before = contents(database_url)
    calls = {
        **CALLS,
        "enqueue": lambda q: target_of(q).enqueue(),
        "enqueue_many": lambda q: target_of(q).enqueue_many([None, None]),
    }
    for name, call in calls.items():
        with closing(DBQueue(database_url)) as queue:
            assert outcome(call, queue) is SchemaTooNew, name
    with closing(DBQueue(database_url)) as queue, callers_connection(database_url) as connection:
        target = target_of(queue)
        with dbqueue.using(connection), pytest.raises(SchemaTooNew):
            target.enqueue()
    assert contents(database_url) == before


@pytest.mark.req("D6")
def test_an_older_schema_is_refused_where_migrating_is_not_allowed(
    database_url: str, open_database: Callable[..., Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(auto_migrate=False)
    with pytest.raises(SchemaMissing, match="dbqueue migrate"):
        database.ready()
    assert dump(database) == ""
    database.migrate()
    monkeypatch.setattr(migrate, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    with pytest.raises(SchemaOutdated, match="dbqueue migrate"):
        database.ready()
    assert len(versions(database_url)) == SCHEMA_VERSION


@pytest.mark.req("D6")
def test_nothing_is_created_in_or_beside_a_callers_transaction(
    database_url: str, open_database: Callable[..., Database]
) -> None:
    with closing(DBQueue(database_url)) as queue:
        target = target_of(queue)
        with callers_connection(database_url) as connection, dbqueue.using(connection):
            for call in (target.enqueue, queue.jobs, lambda: queue.cancel(NOWHERE)):
                with pytest.raises(SchemaMissing):
                    call()
            with pytest.raises(NotSupported, match="rollback"):
                queue.migrate()
        assert dump(open_database()) == ""
        target.enqueue()
        assert queue.counts() == {"pending": 1}


def test_the_numbers_of_the_migrations_are_the_same_on_every_database(open_database: Callable[..., Database]) -> None:
    listed = [m.version for m in migrated_list(open_database())]
    assert listed == list(range(1, SCHEMA_VERSION + 1))
