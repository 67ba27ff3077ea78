"""What callers bring to ``using``: how to reach their connection, and whether a job may be written on it.

Our statements use a cursor of our own on the driver's connection: row factories, text factories, search paths, cursor classes
and isolation levels of the caller do not reach them. (Wrapping the connection in an Engine would: its first connect rolls the
caller's transaction back.)
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlalchemy import orm

from dbqueue.database import touched
from dbqueue.database.dialect import Params, Row
from dbqueue.database.sqlite import different_database
from dbqueue.database.wire import finds_row
from dbqueue.errors import (
    DatabaseError,
    DifferentDatabase,
    EnqueueFailed,
    InvalidArgument,
    NotInTransaction,
    NotSupported,
    QueueError,
    SchemaMissing,
    TransactionTooOld,
)

if TYPE_CHECKING:
    from dbqueue.database.engine import Database

AUTOCOMMIT = (
    "the connection given to using(...) is in autocommit mode with no transaction open, so the job could not commit together "
    "with your rows: begin a transaction first (psycopg: autocommit=False or conn.transaction(); sqlite3: execute BEGIN; "
    "SQLAlchemy: no AUTOCOMMIT isolation level; Django: transaction.atomic())"
)
_CLOSED = "the connection given to using(...) is closed"
_FAILED = "the transaction of the connection given to using(...) has failed before; roll it back"


class CallerSession:
    """A driver's connection that belongs to the caller; each statement has a cursor of its own.

    ``holder`` lives as long as the transaction does, and ``driver_connection(holder)`` is its connection."""

    def __init__(
        self,
        connection: Any,
        cursor: Callable[[], Any],
        execute: Callable[[Any, str, Any], Any] = lambda cursor, statement, params: cursor.execute(statement, params),
        finds: Callable[[str, Params], bool | None] = lambda statement, params: None,
    ) -> None:
        self.holder = connection
        self.driver_connection: Callable[[Any], Any] = lambda holder: holder
        self._cursor, self._execute, self._finds = cursor, execute, finds
        self.changed = 0

    def held_by(self, holder: Any, driver_connection: Callable[[Any], Any]) -> CallerSession:
        self.holder, self.driver_connection = holder, driver_connection
        return self

    def execute(self, statement: str, params: Params | None = None) -> list[Row]:
        cursor = self._cursor()
        try:
            self._execute(cursor, statement, params or {})
            self.changed = cursor.rowcount
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()

    def finds(self, statement: str, params: Params) -> bool:
        """As ``execute``, where nobody asks more than whether there is a row; some drivers have a shorter way to that."""
        found = self._finds(statement, params)
        return bool(self.execute(statement, params)) if found is None else found


@dataclass(frozen=True)
class Caller:
    """A kind of database, and the way to the caller's transaction there. Reaching raises EnqueueFailed and its subclasses."""

    family: str
    reach: Callable[[], CallerSession]


@contextmanager
def failures(database: Database) -> Iterator[None]:
    """Every error on the caller's connection leaves as EnqueueFailed or a subclass, with the driver's as its cause. Its text
    is ours: a driver's message may quote a row, and SQLAlchemy's shows the parameters."""
    try:
        yield
    except QueueError as error:
        if not isinstance(error, DatabaseError):
            raise
        raise EnqueueFailed(_failed(type(error).__name__)) from error
    except Exception as error:
        cause = getattr(error, "orig", None) or error
        kind = database.dialect.classify(cause)
        if kind is SchemaMissing:  # our own connection has just seen them, so this one leads elsewhere
            raise DifferentDatabase(different_database()) from cause
        if kind is TransactionTooOld:
            raise TransactionTooOld((TransactionTooOld.__doc__ or "").replace("\n    ", " ")) from cause
        code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        code = code or getattr(cause, "sqlite_errorname", None)
        raise EnqueueFailed(_failed(f"{type(cause).__name__}{f' {code}' if code else ''}")) from cause


def _failed(what: str) -> str:
    return (
        f"the job could not be written on the connection given to using(...): {what}. Nothing was retried; roll the "
        "transaction back"
    )


def check_database(database: Database, session: CallerSession) -> None:
    """Raises DifferentDatabase unless the caller's connection leads to the queue's own database."""
    if database.dialect.name == "sqlite":
        _check_file(database, session)
    else:
        _check_id(database, session)


# -- what callers bring ------------------------------------------------------------------------------------------------


def caller_of(given: Any) -> Caller:
    """Raises NotSupported for objects that cannot be joined."""
    if isinstance(given, str) and given.startswith("django:"):
        return _django(given.removeprefix("django:"))
    if isinstance(given, orm.scoped_session):
        given = given()
    if isinstance(given, orm.Session):
        return Caller(bind_of(given).dialect.name, lambda: reach_sqlalchemy(given))
    if isinstance(given, sqlalchemy.Connection):
        return Caller(given.dialect.name, lambda: reach_sqlalchemy(given))
    if isinstance(given, sqlite3.Connection):
        return Caller("sqlite", lambda: _reach(given))
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(given).__mro__}
    if names & {"psycopg.Connection", "psycopg2.connection"}:
        return Caller("postgresql", lambda: _reach(given))
    if "django.BaseDatabaseWrapper" in names:
        return _django_wrapper(given)
    if "django.ConnectionProxy" in names:
        return _django(given.alias)
    remedy = "give it a SQLAlchemy, psycopg, psycopg2, sqlite3 or Django connection"
    if names & {"psycopg.AsyncConnection", "asyncpg.Connection", "aiosqlite.Connection"}:
        remedy = "bare async connections cannot be joined; use an AsyncSession or AsyncConnection of SQLAlchemy"
    raise NotSupported(f"using(...) got a value of type {type(given).__name__}: {remedy}")


def bind_of(session: orm.Session) -> sqlalchemy.Engine | sqlalchemy.Connection:
    try:
        return session.get_bind()
    except sqlalchemy.exc.UnboundExecutionError as error:
        raise NotSupported(
            "the Session given to using(...) has no bind of its own; give the Connection of the right database instead: "
            "using(session.connection(bind_arguments={...}))"
        ) from error


def reach_sqlalchemy(given: orm.Session | sqlalchemy.Connection) -> CallerSession:
    """Begins where SQLAlchemy itself would: without its own notion of a transaction, its ``commit()`` does nothing."""
    if isinstance(given, orm.Session):
        if not given.autobegin and not given.in_transaction():
            raise NotInTransaction(
                "the Session given to using(...) has autobegin=False and has not begun: session.begin()"
            )
        given = given.connection()
    begun = None if given.in_transaction() else given.begin()
    try:
        session = _adapted(given) if given.dialect.is_async else _reach(given.connection.driver_connection)
    except NotInTransaction:
        if begun is not None:
            begun.rollback()
        raise
    return session.held_by(given, _of_sqlalchemy)


def _of_sqlalchemy(connection: sqlalchemy.Connection) -> Any:
    return None if connection.closed or connection.invalidated else connection.connection.driver_connection


def _adapted(connection: sqlalchemy.Connection) -> CallerSession:
    """An async driver, from inside SQLAlchemy's greenlet and through its adapter, which looks like a driver's connection."""
    adapter: Any = connection.connection.dbapi_connection
    check_async(adapter)
    if connection.dialect.driver == "asyncpg":
        return CallerSession(adapter, adapter.cursor, lambda c, s, p: c.execute(*_numbered(s, p)))
    return CallerSession(adapter, adapter.cursor)


def check_async(adapter: Any) -> None:
    """Raises NotInTransaction if an async driver's connection commits each statement. Asks the driver only, never the server."""
    driver = adapter.driver_connection
    if hasattr(adapter, "autocommit"):  # asyncpg and psycopg; both adapters begin with the first statement
        if adapter.autocommit and not (
            driver.is_in_transaction() if hasattr(driver, "is_in_transaction") else _begun(driver)
        ):
            raise NotInTransaction(AUTOCOMMIT)
    elif driver.isolation_level is None and not driver.in_transaction:
        raise NotInTransaction(AUTOCOMMIT)


def _begun(connection: Any) -> bool:
    return int(connection.info.transaction_status) != 0


def _numbered(statement: str, params: Params) -> tuple[str, tuple[Any, ...]]:
    """``%(name)s`` as ``$n``, for asyncpg."""
    order: dict[str, int] = {}
    text = re.sub(r"%\((\w+)\)s", lambda m: f"${order.setdefault(m[1], len(order) + 1)}", statement)
    return text, tuple(params[name] for name in order)


def _django(alias: str) -> Caller:
    try:
        from django.db import connections
        from django.utils.connection import ConnectionDoesNotExist
    except ImportError as error:
        raise NotSupported("using('django:...') needs Django, which is not installed") from error
    try:
        return _django_wrapper(connections[alias])
    except ConnectionDoesNotExist:
        raise InvalidArgument("using('django:...'): Django's DATABASES has no such alias") from None


def in_django_transaction(name: str) -> bool:
    """Whether this thread is inside of ``atomic()`` on the alias in ``"django:alias"``. False where Django is not in use."""
    module = sys.modules.get("django.db")
    if module is None:
        return False
    alias = name.removeprefix("django:")
    return alias not in module.connections or bool(module.connections[alias].in_atomic_block)


def _django_wrapper(wrapper: Any) -> Caller:
    def reach() -> CallerSession:
        if wrapper.needs_rollback:
            raise EnqueueFailed(_FAILED)
        wrapper.ensure_connection()
        return _reach(wrapper.connection).held_by(wrapper, lambda holder: holder.connection)

    return Caller(str(wrapper.vendor), reach)


def _reach(connection: Any) -> CallerSession:
    """A cursor of the driver's plain class, whatever factory the connection was given."""
    if isinstance(connection, sqlite3.Connection):
        _check_sqlite(connection)
        return CallerSession(connection, partial(sqlite3.Cursor, connection))
    psycopg, psycopg2 = sys.modules.get("psycopg"), sys.modules.get("psycopg2.extensions")
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        status = int(connection.info.transaction_status)
        _check_status(status, connection.autocommit, connection.closed)
        if status == 1 and not connection.info.pipeline_status:  # it would wait for this very thread to read on
            raise EnqueueFailed(
                "the connection given to using(...) is busy with rows that are not read yet (stream or COPY)"
            )
        return CallerSession(
            connection,
            partial(_psycopg_cursor, connection),
            partial(_execute_psycopg, connection),
            partial(finds_row, connection),
        )
    if psycopg2 is not None and isinstance(connection, psycopg2.connection):
        _check_status(connection.info.transaction_status, connection.autocommit, bool(connection.closed))
        return CallerSession(connection, lambda: connection.cursor(cursor_factory=psycopg2.cursor))
    raise NotSupported(
        f"using(...) cannot join the driver of {type(connection).__module__}; use psycopg, psycopg2 or sqlite3"
    )


def _psycopg_cursor(connection: Any) -> Any:
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    return Cursor(connection, row_factory=tuple_row)


def _execute_psycopg(connection: Any, cursor: Any, statement: str, params: Any) -> None:
    if any(type(value) is list for value in params.values()):
        from psycopg.types.array import ListBinaryDumper

        # As text, bytes in a list are escaped once too often where the caller switched standard_conforming_strings off.
        cursor.adapters.register_dumper(list, ListBinaryDumper)
    if not connection.info.pipeline_status:
        cursor.execute(statement, params, prepare=False)
        return
    with connection.pipeline():  # the caller's own; leaving the inner level waits for our answer
        cursor.execute(statement, params, prepare=False)


def _check_status(status: int, autocommit: bool, closed: bool) -> None:
    """libpq's transaction status: 0 idle, 1 active, 2 in a transaction, 3 in a failed one."""
    if closed:
        raise EnqueueFailed(_CLOSED)
    if status == 3:
        raise EnqueueFailed(_FAILED)
    if status == 0 and autocommit:  # otherwise the driver begins by itself with our statement
        raise NotInTransaction(AUTOCOMMIT)


def _check_sqlite(connection: sqlite3.Connection) -> None:
    try:
        open_now = connection.in_transaction
    except sqlite3.ProgrammingError as error:
        raise EnqueueFailed(_CLOSED) from error
    if open_now:
        return
    legacy = getattr(connection, "autocommit", -1) == -1  # Python 3.12 has other modes: True commits each statement
    if not (legacy and connection.isolation_level is not None):
        raise NotInTransaction(AUTOCOMMIT)


# -- is it the queue's database? ---------------------------------------------------------------------------------------

_checked: weakref.WeakKeyDictionary[Any, set[tuple[str, str]]] = weakref.WeakKeyDictionary()


def _check_id(database: Database, session: CallerSession) -> None:
    """Once a connection: its database carries the queue's id. Two URLs cannot be compared (sockets, poolers, names)."""
    wanted = (database.dialect.names.salt, database.database_id)
    known = _checked.setdefault(session.driver_connection(session.holder), set())
    if wanted in known:
        return
    if database.dialect.database_id(session) != wanted[1]:
        raise DifferentDatabase(different_database())
    known.add(wanted)


def _check_file(database: Database, session: CallerSession) -> None:
    """Its main file is the queue's. This reads nothing from the file: a read would take a snapshot, and the transaction's first
    statement must be a write. (An attached file does not count: two files do not commit together in WAL mode.)"""
    own = os.path.realpath(database.url.database or "")
    path = next((row[2] for row in session.execute("PRAGMA database_list") if row[1] in ("main", b"main")), "")
    try:
        same = bool(path) and os.path.samefile(path if isinstance(path, str) else bytes(path), own)
    except OSError:
        same = False
    if not same:
        raise DifferentDatabase(different_database())
    touched.remember(own, session.holder, session.driver_connection)
