"""An error on the caller's connection leaves as EnqueueFailed: written once, not retried, not tried elsewhere, and told without data."""

from __future__ import annotations

import re
import sqlite3
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import psycopg2
import pytest
import sqlalchemy
from sqlalchemy import orm

from dbqueue import Code, EnqueueFailed, InvalidArgument, InvalidPayload, using
from tests.joined.callers import engine_of
from tests.joined.shop import Order, Shop
from tests.servers import Server
from tests.waiting import wait_for

pytestmark = pytest.mark.req("D5", "D10")

SECRET = Order(1, "s3cret-payload")
KEY = "s3cret-key"

connects = pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])


@contextmanager
def failing(
    shop: Shop, given: Any, cause: type[BaseException] | tuple[type[BaseException], ...] | None
) -> Iterator[None]:
    """The block's enqueue fails, once; ``cause`` is the driver's error, and nowhere is a word of what was to be written."""
    with using(given), pytest.raises(EnqueueFailed) as caught:
        yield
    error = caught.value
    assert error.code in (Code.ENQUEUE_FAILED, Code.TRANSACTION_TOO_OLD)
    if cause is None:
        assert error.__cause__ is None
    else:
        assert isinstance(error.__cause__, cause)
    password = sqlalchemy.make_url(shop.url).password or "s3cret"
    told = "".join(traceback.format_exception(error)).replace(shop.url, "")
    source = "\n".join(
        line for line in told.splitlines() if not line.startswith("    ")
    )  # the code lines of the traceback
    for word in ("s3cret", password, shop.url):
        assert word not in source


def enqueue(shop: Shop) -> None:
    shop.ship.enqueue(SECRET, key=KEY)


@contextmanager
def logged(server: Server, shop: Shop) -> Iterator[Callable[[], list[str]]]:
    """What the database was told, by whom: one ``pid`` for each attempt to write a job."""
    name = sqlalchemy.make_url(shop.url).database
    start = server.log.stat().st_size
    server.execute(f"ALTER DATABASE {name} SET log_statement = 'all'")

    def attempts() -> list[str]:
        with server.log.open(errors="replace") as log:
            log.seek(start)
            entries = re.split(r"^\S+ \S+ \S+ (?=\[)", log.read(), flags=re.MULTILINE)
        found = [entry for entry in entries if "] LOG: " in entry and 'INSERT INTO "public"."dbqueue_jobs"' in entry]
        return [entry[1 : entry.index("]")] for entry in found]

    try:
        yield attempts
    finally:
        server.execute(f"ALTER DATABASE {name} RESET log_statement")


def pid_of(connection: Any) -> str:
    return str(connection.info.backend_pid)


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
@connects
def test_a_deadlock(shop: Shop, postgres: Server, connect: Callable[..., Any]) -> None:
    """The caller holds its row and wants our key; the other holds the key and wants the row."""
    shop.look("INSERT INTO orders VALUES (1)")
    with logged(postgres, shop) as attempts, closing(connect(shop.url)) as connection, closing(shop.connect()) as other:
        cursor = connection.cursor()
        cursor.execute("SET deadlock_timeout = '50ms'")
        cursor.execute("UPDATE orders SET number = 2 WHERE number = 1")
        other.execute("SET deadlock_timeout = '60s'")  # so the caller is the one that is chosen
        with using(other):
            shop.ship.enqueue(Order(7), key=KEY)
        thread = threading.Thread(target=other.execute, args=("UPDATE orders SET number = 3 WHERE number = 1",))
        thread.start()
        wait_for(lambda: waiting(shop, other), message="the other transaction does not wait for the row")
        with failing(shop, connection, (psycopg.errors.DeadlockDetected, psycopg2.errors.DeadlockDetected)):
            enqueue(shop)
        mine, before = pid_of(connection), len(attempts())
        thread.join()
        with using(connection), pytest.raises(EnqueueFailed, match="failed before"):
            shop.ship.enqueue(Order(2))  # refused without a statement
        connection.rollback()
        other.commit()
        assert attempts().count(mine) == 1
        assert len(attempts()) == before == 2
    assert shop.jobs() == [7]


def waiting(shop: Shop, connection: Any) -> bool:
    return bool(
        shop.look(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid_of(connection)} AND wait_event_type = 'Lock'")
    )


@pytest.mark.databases("postgres")
@connects
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_serialization_failure(shop: Shop, postgres: Server, connect: Callable[..., Any], level: str) -> None:
    """The key was taken after the caller's snapshot: what the caller may not see, it may not be told either."""
    with logged(postgres, shop) as attempts, closing(connect(shop.url)) as connection:
        cursor = connection.cursor()
        cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        cursor.execute("SELECT * FROM orders")
        shop.ship.enqueue(Order(7), key=KEY)
        failed = (psycopg.errors.SerializationFailure, psycopg2.errors.SerializationFailure)
        with failing(shop, connection, failed):
            enqueue(shop)
        assert attempts().count(pid_of(connection)) == 1
    assert shop.jobs() == [7]


@pytest.mark.databases("postgres")
@connects
def test_a_lock_timeout(shop: Shop, postgres: Server, connect: Callable[..., Any]) -> None:
    with logged(postgres, shop) as attempts, closing(connect(shop.url)) as connection, closing(shop.connect()) as other:
        with using(other):
            shop.ship.enqueue(Order(7), key=KEY)
        connection.cursor().execute("SET lock_timeout = '50ms'")
        with failing(shop, connection, (psycopg.errors.LockNotAvailable, psycopg2.errors.LockNotAvailable)):
            enqueue(shop)
        assert attempts().count(pid_of(connection)) == 1
        assert len(attempts()) == 2
        other.commit()
    assert shop.jobs() == [7]


@pytest.mark.databases("postgres")
@connects
def test_a_connection_that_is_cut(shop: Shop, postgres: Server, connect: Callable[..., Any]) -> None:
    with logged(postgres, shop) as attempts, closing(connect(shop.url)) as connection:
        cursor = connection.cursor()
        cursor.execute("INSERT INTO orders VALUES (1)")
        postgres.execute("SELECT pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
        with failing(shop, connection, (psycopg.OperationalError, psycopg2.OperationalError)):
            enqueue(shop)
        with using(connection), pytest.raises(EnqueueFailed, match="closed"):
            enqueue(shop)
        assert attempts() == []
    assert shop.both() == ([], [])


@pytest.mark.databases("postgres")
@connects
def test_a_transaction_that_has_failed_before(shop: Shop, postgres: Server, connect: Callable[..., Any]) -> None:
    with logged(postgres, shop) as attempts, closing(connect(shop.url)) as connection:
        cursor = connection.cursor()
        with pytest.raises((psycopg.Error, psycopg2.Error)):
            cursor.execute("SELECT 1/0")
        with failing(shop, connection, None):
            enqueue(shop)
        connection.rollback()
        connection.close()
        with failing(shop, connection, None):
            enqueue(shop)
        assert attempts() == []
    assert shop.jobs() == []


@pytest.mark.databases("postgres")
@connects
def test_a_role_that_may_not_insert(shop: Shop, postgres: Server, connect: Callable[..., Any]) -> None:
    shop.look("DO $$ BEGIN CREATE ROLE clerk; EXCEPTION WHEN duplicate_object THEN END $$")
    shop.look("GRANT SELECT ON ALL TABLES IN SCHEMA public TO clerk")
    with logged(postgres, shop) as attempts, closing(connect(shop.url)) as connection:
        connection.cursor().execute("SET ROLE clerk")
        denied = (psycopg.errors.InsufficientPrivilege, psycopg2.errors.InsufficientPrivilege)
        with failing(shop, connection, denied):
            enqueue(shop)
        assert attempts() == [pid_of(connection)]
    shop.look("DROP OWNED BY clerk")
    assert shop.jobs() == []


@pytest.mark.databases("postgres")
@connects
def test_a_transaction_that_may_only_read(shop: Shop, postgres: Server, connect: Callable[..., Any]) -> None:
    with logged(postgres, shop) as attempts, closing(connect(shop.url)) as connection:
        connection.cursor().execute("SET TRANSACTION READ ONLY")
        with failing(shop, connection, (psycopg.errors.ReadOnlySqlTransaction, psycopg2.errors.ReadOnlySqlTransaction)):
            enqueue(shop)
        assert attempts() == [pid_of(connection)]
    assert shop.jobs() == []


@pytest.mark.databases("postgres")
def test_through_sqlalchemy_the_cause_is_the_drivers_error(shop: Shop, postgres: Server) -> None:
    """SQLAlchemy's own error would show the statement with its parameters."""
    for driver in ("psycopg", "psycopg2"):
        engine = engine_of(shop, driver)
        with logged(postgres, shop) as attempts, orm.Session(engine) as session:
            session.execute(sqlalchemy.text("SET TRANSACTION READ ONLY"))
            with failing(
                shop, session, (psycopg.errors.ReadOnlySqlTransaction, psycopg2.errors.ReadOnlySqlTransaction)
            ):
                enqueue(shop)
            assert len(attempts()) == 1
        with orm.Session(engine) as session:
            with pytest.raises(sqlalchemy.exc.DBAPIError):
                session.execute(sqlalchemy.text("SELECT 1/0"))
            with using(session), pytest.raises(EnqueueFailed, match="failed before"):
                enqueue(shop)
        with engine.connect() as connection:
            pass
        with failing(shop, connection, sqlalchemy.exc.ResourceClosedError):
            enqueue(shop)
        engine.dispose()
    assert shop.jobs() == []


@pytest.mark.databases("postgres")
@connects
def test_a_savepoint_saves_the_transaction(shop: Shop, connect: Callable[..., Any]) -> None:
    with closing(connect(shop.url)) as connection, closing(shop.connect()) as other:
        with using(other):
            shop.ship.enqueue(Order(7), key=KEY)
        cursor = connection.cursor()
        cursor.execute("INSERT INTO orders VALUES (1)")
        cursor.execute("SAVEPOINT mine")
        cursor.execute("SET LOCAL lock_timeout = '10ms'")
        with using(connection):
            with pytest.raises(EnqueueFailed):
                enqueue(shop)
            cursor.execute("ROLLBACK TO SAVEPOINT mine")
            shop.ship.enqueue(Order(2), key="another")
        connection.commit()
        other.rollback()
    assert shop.both() == ([1], [2])


# -- SQLite ------------------------------------------------------------------------------------------------------------


@contextmanager
def traced(connection: sqlite3.Connection) -> Iterator[list[str]]:
    """The statements that write a job, as SQLite ran them on this connection."""
    seen: list[str] = []
    connection.set_trace_callback(lambda text: seen.append(text) if 'INTO "dbqueue_jobs"' in text else None)
    yield seen
    connection.set_trace_callback(None)


@pytest.mark.databases("sqlite")
def test_sqlite_locked_by_somebody_else(shop: Shop) -> None:
    with (
        closing(shop.connect()) as other,
        closing(shop.connect(timeout=0)) as connection,
        traced(connection) as attempts,
    ):
        other.execute("BEGIN IMMEDIATE")
        with failing(shop, connection, sqlite3.OperationalError):
            enqueue(shop)
        assert len(attempts) == 1
        other.rollback()
    assert shop.jobs() == []


@pytest.mark.databases("sqlite")
def test_sqlite_that_may_only_be_read(shop: Shop) -> None:
    with closing(sqlite3.connect(f"file:{shop.path}?mode=ro", uri=True)) as connection, traced(connection) as attempts:
        with failing(shop, connection, sqlite3.OperationalError):
            enqueue(shop)
        assert len(attempts) == 1
        connection.rollback()
    with closing(shop.connect()) as connection:
        connection.execute("PRAGMA query_only = on")
        with failing(shop, connection, sqlite3.OperationalError):
            enqueue(shop)
    assert shop.jobs() == []


@pytest.mark.databases("sqlite")
def test_a_constraint_of_somebody_elses(shop: Shop) -> None:
    shop.look("CREATE TRIGGER no BEFORE INSERT ON dbqueue_jobs BEGIN SELECT RAISE(ABORT, 'no'); END")
    try:
        with closing(shop.connect()) as connection:
            connection.execute("INSERT INTO orders VALUES (1)")
            with failing(shop, connection, sqlite3.IntegrityError):
                enqueue(shop)
            connection.rollback()
    finally:
        shop.look("DROP TRIGGER no")
    assert shop.both() == ([], [])


@pytest.mark.databases("sqlite")
def test_a_closed_connection(shop: Shop) -> None:
    connection = shop.connect()
    connection.close()
    with failing(shop, connection, sqlite3.ProgrammingError):
        enqueue(shop)


@pytest.mark.databases("sqlite")
def test_a_connection_of_another_thread(shop: Shop) -> None:
    with closing(shop.connect()) as connection:
        failed: list[BaseException] = []

        def elsewhere() -> None:
            try:
                with using(connection):
                    enqueue(shop)
            except EnqueueFailed as error:
                failed.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert isinstance(failed[0].__cause__, sqlite3.ProgrammingError)
    assert shop.jobs() == []


# -- errors that are not the database's --------------------------------------------------------------------------------


@pytest.mark.req("D4")
def test_a_wrong_argument_is_told_before_the_connection_is_touched(shop: Shop) -> None:
    with closing(shop.connect()) as connection:
        with using(connection):
            with pytest.raises(InvalidPayload):
                shop.ship.enqueue(7)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                shop.ship.enqueue(Order(1), delay=-1)
            with pytest.raises(InvalidArgument):
                shop.queue.cancel("no-uuid")  # type: ignore[arg-type]
        if not shop.postgres:
            assert not connection.in_transaction
        else:
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
