"""A job in any state in one call, and what the tables say about it.

`make` writes the row as the verbs would have left it, with any column given instead; it runs no verb, so a broken verb
cannot spoil the start of another's test. `rows` reads both tables whole: two of its answers are equal only if nothing
changed at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from dbqueue import ids
from dbqueue.clock import SECOND
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import FINISHED_COLUMNS, JOB_COLUMNS, ClaimRequest, Held, NewJob, Settlement, Turn
from dbqueue.errors import ConnectionLost
from dbqueue.states import Kind, OnCrash, State

LEASE = 60 * SECOND
"""What a job made in RUNNING has left, in microseconds."""

PAST = 3600 * SECOND
"""How long ago everything else happened to a job that is made, so that whatever a verb writes differs from it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Everything that both tables hold: unfinished jobs by id, ends by id and instant."""

    jobs: dict[bytes, Row]
    finished: dict[tuple[bytes, int], Row]

    def of(self, job_id: bytes) -> Row | None:
        """The newest record of one job."""
        ends = [row for (found, _), row in sorted(self.finished.items()) if found == job_id]
        return self.jobs.get(job_id) or (ends[-1] if ends else None)

    def state(self, job_id: bytes) -> State | None:
        row = self.of(job_id)
        return None if row is None else State(row["state"])


@dataclass(frozen=True)
class Job:
    """A job that `make` wrote. The token is the one of its last claim, also where the row no longer has it."""

    id: bytes
    token: bytes
    row: Row

    @property
    def held(self) -> Held:
        return Held(self.id, self.token)

    def settlement(self, state: State, kind: Kind | None = None, **more: Any) -> Settlement:
        return Settlement(self.id, self.token, state, self.row["queue"], kind, **more)


def make(database: Database, state: State = State.PENDING, **columns: Any) -> Job:
    """Writes one job in ``state`` by the database's clock. A pending one with a ``run_at`` in the future waits for it."""
    with database.session() as session:
        now = database.dialect.now(session)
        row = _defaults(state, now) | columns
        if state is State.PENDING and "ready_at" not in columns and row["run_at"] <= now:
            row["ready_at"] = now - PAST
        names = JOB_COLUMNS if not state.finished else FINISHED_COLUMNS
        row = {name: row.get(name) for name in names}
        insert(database, session, "finished" if state.finished else "jobs", row)
    return Job(row["id"], row["token"] or ids.new_token(), row)


def _defaults(state: State, now: int) -> Row:
    claimed = state is State.RUNNING or state.finished
    past = now - PAST
    row: Row = {
        "id": ids.new_id(), "target": "tests.target", "payload": b"{}", "queue": "default", "priority": 9, "state": int(state),
        "run_at": past, "attempt": 0, "lapses": 0, "max_attempts": 3, "on_crash": 0, "created_at": past, "updated_at": past,
        "finished_at": past,
    }  # fmt: skip
    if claimed or state is State.UNKNOWN:
        row |= {"attempt": 1, "worker": "tests", "started_at": past}
    if claimed:
        row["token"] = ids.new_token()
    if state is State.RUNNING:
        row["lease_until"] = now + LEASE
    if state is State.BLOCKED:
        row["error_kind"] = Kind.UNKNOWN_TARGET.value
    if state is State.UNKNOWN:
        row |= {"lapses": 1, "on_crash": int(OnCrash.UNKNOWN), "error_kind": Kind.CRASHED.value}
    if state is State.DEAD:
        row |= {"error_kind": Kind.FAILED.value, "error_summary": "ValueError"}
    return row


def insert(database: Database, session: OwnSession, table: str, row: Row) -> None:
    postgres = database.dialect.name == "postgresql"
    values = ", ".join(f"%({name})s" if postgres else f":{name}" for name in row)
    bound = {name: _bound(database, name, value) for name, value in row.items()}
    session.execute(
        f"INSERT INTO {database.dialect.names.qualified(table)} ({', '.join(row)}) VALUES ({values})", bound
    )


def _bound(database: Database, name: str, value: Any) -> Any:
    return database.dialect.bind_id(value) if name in ("id", "token") and value is not None else value


def set_columns(database: Database, job_id: bytes, **columns: Any) -> None:
    """Overwrites columns of an unfinished job."""
    postgres = database.dialect.name == "postgresql"
    sets = ", ".join(f"{name} = " + (f"%({name})s" if postgres else f":{name}") for name in columns)
    where = "%(_id)s::uuid" if postgres else ":_id"
    bound = {name: _bound(database, name, value) for name, value in columns.items()}
    bound["_id"] = database.dialect.bind_id(job_id)
    with database.session() as session:
        session.execute(f"UPDATE {database.dialect.names.qualified('jobs')} SET {sets} WHERE id = {where}", bound)


def rows(database: Database) -> Rows:
    with database.session() as session:
        jobs = _read(database, session, "jobs", JOB_COLUMNS)
        finished = _read(database, session, "finished", FINISHED_COLUMNS)
    return Rows({row["id"]: row for row in jobs}, {(row["id"], row["finished_at"]): row for row in finished})


def _read(database: Database, session: OwnSession, table: str, columns: tuple[str, ...]) -> list[Row]:
    found = session.execute(f"SELECT {', '.join(columns)} FROM {database.dialect.names.qualified(table)}")
    return [
        {name: bytes(v) if isinstance(v, memoryview) else v for name, v in zip(columns, row, strict=True)}
        for row in found
    ]


def clear(database: Database) -> None:
    """Empties both tables and sets the clock right."""
    database.clock.offset = 0
    with database.session() as session:
        for table in ("jobs", "finished"):
            session.execute(f"DELETE FROM {database.dialect.names.qualified(table)}")


def now(database: Database) -> int:
    with database.session() as session:
        return database.dialect.now(session)


def new_job(**columns: Any) -> NewJob:
    """What a producer hands to `dialect.enqueue`."""
    given: Row = {"id": ids.new_id(), "target": "tests.target", "queue": "default", "payload": b"{}", "max_attempts": 3}
    return NewJob(**given | columns)


def claim_turn(
    limit: int = 1,
    *,
    queues: tuple[str, ...] = ("default",),
    lease: int = LEASE,
    worker: str = "w",
    token: bytes | None = None,
) -> Turn:
    return Turn(lease=lease, claim=ClaimRequest(queues, limit, worker, token or ids.new_token(), lease))


def joined_to(database: Database, connection: Any) -> OwnSession:
    """A session in the transaction of a connection that does not commit by itself; it is begun here."""
    connection.execute("SELECT 1")
    return database.dialect.session(connection)


def run_together(calls: Sequence[Callable[[], object]]) -> None:
    """Each call in a thread of its own, all from one instant on; the first error of any is raised."""
    start, errors = threading.Barrier(len(calls)), []

    def run(call: Callable[[], object]) -> None:
        try:
            start.wait()
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Database]:
    """A migrated database."""
    database = Database(url, **options)
    try:
        database.ready()
        yield database
    finally:
        database.close()


@pytest.fixture
def fresh_db(database_url: str) -> Iterator[Database]:
    """A migrated database of the test's own."""
    with opened(database_url) as database:
        yield database


@pytest.fixture(scope="session")
def kept_databases() -> Iterator[dict[str, Database]]:
    kept: dict[str, Database] = {}
    yield kept
    for database in kept.values():
        database.close()


@pytest.fixture
def db(
    database: str,
    kept_databases: dict[str, Database],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Database:
    """A migrated database with empty tables. All tests of a session share one of each kind: they are many, and a fresh
    one takes longer than most of them."""
    url = f"sqlite:///{tmp_path_factory.getbasetemp() / 'kept.db'}"
    if database != "sqlite":
        server = request.getfixturevalue("postgres")  # running again, if a test stopped it
        url = server.dsn(server.create_database()) if database not in kept_databases else ""
    if database not in kept_databases:
        kept_databases[database] = Database(url)
        kept_databases[database].ready()
    kept = kept_databases[database]
    try:
        clear(kept)
    except ConnectionLost:
        clear(kept)
    return kept


@pytest.fixture
def session(db: Database) -> Iterator[OwnSession]:
    """A worker's connection to `db`."""
    own = db.open_session()
    yield own
    own.close()
