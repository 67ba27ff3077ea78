"""Joining the caller's transaction: ``with dbqueue.using(session): ...`` (D5, C5).

Inside the block every write of dbqueue goes through the caller's own physical connection, so job and business row commit
together or not at all; savepoints included. dbqueue never begins, commits or rolls back there, never retries and never falls
back to another connection: an error leaves as EnqueueFailed, and the caller rolls back.

Our statements use a cursor of our own on the driver's connection: row factories, text factories, search paths, cursor classes
and isolation levels of the caller do not reach them. (Wrapping the connection in an Engine would: its first connect rolls the
caller's transaction back.)

Async SQLAlchemy cannot be written to from a plain call. There the job is kept in memory and written by that session's own
commit, just before COMMIT, on its connection; a rollback, also to a savepoint, forgets it.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlalchemy import event, orm

from dbqueue.database.dialect import Params, Row, Session
from dbqueue.database.sqlite import different_database
from dbqueue.database.tables import NewJob
from dbqueue.errors import (
    DifferentDatabase,
    EnqueueFailed,
    KeyTaken,
    NotInTransaction,
    NotSupported,
    QueueError,
    SchemaMissing,
    TransactionClosed,
    TransactionTooOld,
)

if TYPE_CHECKING:
    from dbqueue.database.engine import Database

_current: ContextVar[Block | None] = ContextVar("dbqueue_using", default=None)
_touched = threading.local()
_checked: weakref.WeakKeyDictionary[Any, set[tuple[str, str]]] = weakref.WeakKeyDictionary()

_AUTOCOMMIT = (
    "the connection given to using(...) is in autocommit mode with no transaction open, so the job could not commit together with "
    "your rows: begin a transaction first (psycopg: autocommit=False or conn.transaction(); sqlite3: execute BEGIN; "
    "SQLAlchemy: no AUTOCOMMIT isolation level; Django: transaction.atomic())"
)


class CallerSession:
    """A driver's connection that belongs to the caller; each statement has a cursor of its own."""

    def __init__(self, cursor: Callable[[], Any], execute: Callable[[Any, str, Any], Any]) -> None:
        self._cursor, self._execute = cursor, execute
        self.changed = 0

    def execute(self, statement: str, params: Params | None = None) -> list[Row]:
        cursor = self._cursor()
        try:
            self._execute(cursor, statement, params or {})
            self.changed = cursor.rowcount
            return cursor.fetchall() if cursor.description else []
        finally:
            cursor.close()


class SqlalchemySession:
    """An async engine's connection, driven from inside its greenlet through SQLAlchemy's own adapter."""

    def __init__(self, connection: sqlalchemy.Connection) -> None:
        self._connection = connection
        self._numbered = connection.dialect.driver == "asyncpg"
        self.changed = 0

    def execute(self, statement: str, params: Params | None = None) -> list[Row]:
        values: Any = params or {}
        if self._numbered:
            statement, values = _numbered(statement, values)
        result = self._connection.exec_driver_sql(statement, values)
        self.changed = result.rowcount
        return [tuple(row) for row in result.fetchall()] if result.returns_rows else []


def _numbered(statement: str, params: Params) -> tuple[str, tuple[Any, ...]]:
    """``%(name)s`` as ``$n``, for asyncpg."""
    order: dict[str, int] = {}
    text = re.sub(r"%\((\w+)\)s", lambda m: f"${order.setdefault(m[1], len(order) + 1)}", statement)
    return text, tuple(params[name] for name in order)


@dataclass
class Caller:
    """What ``using`` was given: how to reach its connection, or the buffer of an async one."""

    family: str
    session: Callable[[], tuple[Session, Any]] | None = None
    buffer: Buffer | None = None


class Block:
    """One ``using`` block. Whoever inherited it (a thread, a task) and uses it after its end gets TransactionClosed."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.closed = False

    def check(self, database: Database) -> None:
        if self.closed:
            raise TransactionClosed(
                "the using(...) block that this thread, task or coroutine inherited has ended; enqueue inside the block, or start the "
                "thread or task outside of it"
            )
        if self.caller.family != database.dialect.name:
            raise DifferentDatabase(different_database())
        database.check_ready()

    def session(self, database: Database) -> Session:
        """The caller's connection, checked: in a transaction, and of the queue's own database."""
        assert self.caller.session is not None
        session, connection = self.caller.session()
        if isinstance(connection, sqlite3.Connection):
            _touch(database, connection)
        else:
            _check_database(database, session, connection)
        return session


def current() -> Block | None:
    return _current.get()


@contextmanager
def using(connection: Any) -> Iterator[None]:
    """Joins the transaction of ``connection`` until the block ends; never begins, commits or rolls it back.

    ``connection`` is a SQLAlchemy Session or Connection (sync or async), a psycopg 2 or 3 connection, a sqlite3 connection, or a
    Django connection or its alias as ``"django:default"``. Blocks nest; the innermost counts. If the process dies before the
    caller's COMMIT, neither rows nor jobs exist. Raises NotSupported for other objects; enqueueing in the block raises
    NotInTransaction, DifferentDatabase, TransactionTooOld (SQLite) or EnqueueFailed (D5)."""
    block = Block(_caller(connection))
    token = _current.set(block)
    try:
        yield
    finally:
        block.closed = True
        _current.reset(token)


@contextmanager
def failures(database: Database) -> Iterator[None]:
    """Every database error on the caller's connection leaves as EnqueueFailed or a subclass, with the driver's as its cause."""
    try:
        yield
    except (EnqueueFailed, KeyTaken):
        raise
    except Exception as error:
        driver_error = getattr(error, "orig", None) or error
        kind = type(error) if isinstance(error, QueueError) else database.dialect.classify(driver_error)
        if kind is SchemaMissing:  # our own connection has just seen them, so this one leads elsewhere
            raise DifferentDatabase(different_database()) from error
        if kind is TransactionTooOld:
            raise TransactionTooOld((TransactionTooOld.__doc__ or "").replace("\n    ", " ")) from error
        if kind is None and not isinstance(error, sqlalchemy.exc.SQLAlchemyError):
            raise
        code = getattr(driver_error, "sqlstate", None) or getattr(driver_error, "pgcode", None)
        code = code or getattr(driver_error, "sqlite_errorname", None)
        raise EnqueueFailed(
            f"the job could not be written on the connection given to using(...): {type(driver_error).__name__}"
            f"{f' {code}' if code else ''}. Nothing was retried; roll the transaction back"
        ) from error


# -- what callers bring ------------------------------------------------------------------------------------------------


def _caller(given: Any) -> Caller:
    if isinstance(given, str) and given.startswith("django:"):
        return _django(given.removeprefix("django:"))
    if isinstance(given, orm.scoped_session):
        given = given()
    if isinstance(given, orm.Session):
        return Caller(_bind_dialect(given), lambda: _sqlalchemy(given.connection()))
    if isinstance(given, sqlalchemy.Connection):
        return Caller(given.dialect.name, lambda: _sqlalchemy(given))
    asyncio_caller = _async_sqlalchemy(given)
    if asyncio_caller is not None:
        return asyncio_caller
    return _raw(given)


def _raw(given: Any) -> Caller:
    if isinstance(given, sqlite3.Connection):
        return Caller("sqlite", lambda: _driver(given))
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(given).__mro__}
    if "psycopg.Connection" in names or "psycopg2.connection" in names:
        return Caller("postgresql", lambda: _driver(given))
    if "django.BaseDatabaseWrapper" in names:
        return _django(given.alias)
    remedy = "give it a SQLAlchemy, psycopg, psycopg2, sqlite3 or Django connection"
    if names & {"psycopg.AsyncConnection", "asyncpg.Connection", "aiosqlite.Connection"}:
        remedy = "bare async connections cannot be joined; use an AsyncSession or AsyncConnection of SQLAlchemy"
    raise NotSupported(f"using(...) got a value of type {type(given).__name__}: {remedy}")


def _bind_dialect(session: orm.Session) -> str:
    try:
        return str(session.get_bind().dialect.name)
    except sqlalchemy.exc.UnboundExecutionError as error:
        raise NotSupported(
            "the Session given to using(...) has no bind of its own; give the Connection of the right database instead: "
            "using(session.connection(bind_arguments={...}))"
        ) from error


def _sqlalchemy(connection: sqlalchemy.Connection) -> tuple[Session, Any]:
    if connection.dialect.is_async:
        driver = connection.connection.dbapi_connection
        if getattr(driver, "autocommit", False) is True or getattr(driver, "isolation_level", "") in (
            "autocommit",
            None,
        ):
            raise NotInTransaction(_AUTOCOMMIT)
        return SqlalchemySession(connection), driver
    return _driver(connection.connection.driver_connection)


def _django(alias: str) -> Caller:
    try:
        from django.db import connections
    except ImportError as error:
        raise NotSupported("using('django:...') needs Django, which is not installed") from error
    wrapper = connections[alias]

    def session() -> tuple[Session, Any]:
        if not wrapper.in_atomic_block and wrapper.get_autocommit():
            raise NotInTransaction(_AUTOCOMMIT)
        wrapper.ensure_connection()
        return _driver(wrapper.connection)

    return Caller(str(wrapper.vendor), session)


def _driver(connection: Any) -> tuple[Session, Any]:
    """A cursor of the driver's plain class, whatever factory the connection was given."""
    if isinstance(connection, sqlite3.Connection):
        _check_sqlite(connection)
        return CallerSession(lambda: sqlite3.Cursor(connection), lambda c, s, p: c.execute(s, p)), connection
    module = sys.modules.get("psycopg")
    if module is not None and isinstance(connection, module.Connection):
        _check_status(int(connection.info.transaction_status), connection.autocommit, connection.closed)
        rows = sys.modules["psycopg.rows"].tuple_row
        return (
            CallerSession(
                lambda: module.Cursor(connection, row_factory=rows), lambda c, s, p: c.execute(s, p, prepare=False)
            ),
            connection,
        )
    plain = sys.modules["psycopg2.extensions"].cursor
    _check_status(connection.info.transaction_status, connection.autocommit, bool(connection.closed))
    return CallerSession(lambda: connection.cursor(cursor_factory=plain), lambda c, s, p: c.execute(s, p)), connection


def _check_status(status: int, autocommit: bool, closed: bool) -> None:
    """libpq's transaction status: 0 idle, 1 active, 2 in a transaction, 3 in a failed one."""
    if closed:
        raise EnqueueFailed("the connection given to using(...) is closed")
    if status == 3:
        raise EnqueueFailed("the transaction of the connection given to using(...) has failed before; roll it back")
    if status == 0 and autocommit:  # otherwise the driver begins by itself with our statement
        raise NotInTransaction(_AUTOCOMMIT)


def _check_sqlite(connection: sqlite3.Connection) -> None:
    try:
        open_now = connection.in_transaction
    except sqlite3.ProgrammingError as error:
        raise EnqueueFailed("the connection given to using(...) is closed") from error
    if open_now:
        return
    legacy = getattr(connection, "autocommit", -1) == -1  # Python 3.12 has other modes: True commits each statement
    if not (legacy and connection.isolation_level is not None):
        raise NotInTransaction(_AUTOCOMMIT)


def _check_database(database: Database, session: Session, connection: Any) -> None:
    """Once a connection: its database carries the queue's id. Two URLs cannot be compared (sockets, poolers, names)."""
    wanted = (database.dialect.names.salt, database.database_id)
    try:
        if wanted in _checked.get(connection, ()):
            return
    except TypeError:  # a driver's connection that cannot be referenced weakly is asked each time
        pass
    if database.dialect.database_id(session) != wanted[1]:
        raise DifferentDatabase(different_database())
    try:
        _checked.setdefault(connection, set()).add(wanted)
    except TypeError:
        pass


# -- the thread's own open transactions --------------------------------------------------------------------------------


def _touch(database: Database, connection: sqlite3.Connection) -> None:
    kept = [c for c in getattr(_touched, "connections", ()) if c is not connection and _open(c)]
    _touched.connections = [*kept, connection]


def thread_holds_lock(database: Database) -> bool:
    """Whether this thread wrote through ``using`` on the queue's file and has not ended that transaction: a write on a connection
    of our own would then wait for this very thread."""
    connections = [c for c in getattr(_touched, "connections", ()) if _open(c)]
    _touched.connections = connections
    own = os.path.realpath(database.url.database or "")
    return any(_file(c) == own for c in connections)


def _open(connection: sqlite3.Connection) -> bool:
    try:
        return connection.in_transaction
    except sqlite3.ProgrammingError:  # closed
        return False


def _file(connection: sqlite3.Connection) -> str | None:
    try:
        rows = sqlite3.Cursor(connection).execute("PRAGMA database_list").fetchall()
    except sqlite3.Error:
        return None
    path = next((row[2] for row in rows if row[1] in ("main", b"main")), "")
    return os.path.realpath(os.fsdecode(path)) if path else None


# -- async SQLAlchemy --------------------------------------------------------------------------------------------------


class Buffer:
    """Jobs that wait for the commit of one async session or connection. ``place`` is the innermost open transaction when the job
    was added: rolled back with it, handed to its parent when it is released."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, Database, NewJob]] = []
        self.place: Callable[[], Any] = lambda: None

    def add(self, database: Database, job: NewJob) -> None:
        self.jobs.append((self.place(), database, job))

    def flush(self, connection: sqlalchemy.Connection) -> None:
        """Inside the greenlet of the caller's commit, before COMMIT is sent. An error makes that commit fail."""
        waiting, self.jobs = self.jobs, []
        for _, database, job in waiting:
            with failures(database):
                session, driver = _sqlalchemy(connection)
                if database.dialect.name != "sqlite":
                    _check_database(database, session, driver)
                database.dialect.enqueue(session, job, database.database_id)

    def forget(self, gone: Callable[[Any], bool]) -> None:
        self.jobs = [entry for entry in self.jobs if not gone(entry[0])]


_buffers: weakref.WeakKeyDictionary[Any, Buffer] = weakref.WeakKeyDictionary()


def _async_sqlalchemy(given: Any) -> Caller | None:
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return None
    from sqlalchemy.ext import asyncio as extension

    if isinstance(given, extension.async_scoped_session):
        given = given()
    if isinstance(given, extension.AsyncSession):
        session = given.sync_session
        return Caller(_bind_dialect(session), buffer=_buffer(session, _listen_session))
    if isinstance(given, extension.AsyncConnection):
        connection = given.sync_connection
        if connection is None:
            raise NotSupported("the AsyncConnection given to using(...) is not open yet: await it, or use `async with`")
        return Caller(connection.dialect.name, buffer=_buffer(connection, _listen_connection))
    return None


def _buffer(owner: Any, listen: Callable[[Any, Buffer], None]) -> Buffer:
    buffer = _buffers.get(owner)
    if buffer is None:
        buffer = _buffers[owner] = Buffer()
        listen(owner, buffer)
    return buffer


def _listen_session(session: orm.Session, buffer: Buffer) -> None:
    reference = weakref.ref(session)

    def place() -> Any:
        owner = reference()
        return None if owner is None else owner.get_nested_transaction() or owner.get_transaction()

    def before_commit(owner: orm.Session) -> None:
        if buffer.jobs and not owner.in_nested_transaction():
            buffer.flush(owner.connection())

    def after_soft_rollback(owner: orm.Session, previous: orm.SessionTransaction) -> None:
        buffer.forget(lambda place: place is previous or (previous.parent is None and place is None))

    def after_transaction_end(owner: orm.Session, ended: orm.SessionTransaction) -> None:
        buffer.jobs = [(ended.parent if place is ended else place, *rest) for place, *rest in buffer.jobs]  # type: ignore[misc]

    buffer.place = place
    for listener in (before_commit, after_soft_rollback, after_transaction_end):
        event.listen(session, listener.__name__, listener)


def _listen_connection(connection: sqlalchemy.Connection, buffer: Buffer) -> None:
    """A connection's savepoints form a stack, so a place is its depth."""
    stack: list[str] = []
    buffer.place = lambda: len(stack)

    def leave(name: str) -> int:
        depth = stack.index(name) + 1 if name in stack else len(stack) + 1
        del stack[depth - 1 :]
        return depth

    def commit(owner: sqlalchemy.Connection) -> None:
        if buffer.jobs:
            buffer.flush(owner)

    def rollback(owner: sqlalchemy.Connection) -> None:
        stack.clear()
        buffer.jobs.clear()

    def savepoint(owner: sqlalchemy.Connection, name: str | None) -> None:
        stack.append(str(name))

    def rollback_savepoint(owner: sqlalchemy.Connection, name: str, context: None) -> None:
        depth = leave(name)
        buffer.forget(lambda place: place >= depth)

    def release_savepoint(owner: sqlalchemy.Connection, name: str, context: None) -> None:
        depth = leave(name)
        buffer.jobs = [(min(place, depth - 1), *rest) for place, *rest in buffer.jobs]  # type: ignore[misc]

    for listener in (commit, rollback, savepoint, rollback_savepoint, release_savepoint):
        event.listen(connection, listener.__name__, listener)
