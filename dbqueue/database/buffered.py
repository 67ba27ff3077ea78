"""Joining async SQLAlchemy, which cannot be written to from a plain call.

The job is kept in memory and written by that session's own commit, just before COMMIT is sent, on its connection. A rollback,
also to a savepoint, forgets it; so does a session that is closed without a commit. If writing fails, the commit fails, and
SQLAlchemy insists on a rollback before it goes on.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import sqlalchemy
from sqlalchemy import event, orm

from dbqueue.database.callers import AUTOCOMMIT, bind_of, check_async, check_database, failures, reach_sqlalchemy
from dbqueue.database.dialect import Session
from dbqueue.database.sqlite import different_database
from dbqueue.database.tables import NewJob
from dbqueue.errors import DifferentDatabase, NotInTransaction, NotSupported

if TYPE_CHECKING:
    from dbqueue.database.engine import Database

_SAVEPOINT = re.compile(
    r"\s*(SAVEPOINT|ROLLBACK\s+(?:(?:WORK|TRANSACTION)\s+)?TO(?:\s+SAVEPOINT)?|RELEASE(?:\s+SAVEPOINT)?)\s+([^\s;]+)\s*;?\s*$",
    re.IGNORECASE,
)


class Buffer:
    """Jobs that wait for the commit of one async session or connection. ``place`` is the innermost open transaction when a job
    was added: the job is forgotten when that is rolled back, and handed to its parent when it is released."""

    holds_lock = False
    """Whether nothing can be written beside it: its transaction is open, and has the one write lock."""

    def __init__(self, family: str, place: Callable[[], Any]) -> None:
        self.family = family
        self._place = place
        self._waiting: list[tuple[Any, Database, Callable[[Session], object]]] = []

    @property
    def empty(self) -> bool:
        return not self._waiting

    def add(self, database: Database, new: Sequence[NewJob]) -> None:
        def write(session: Session) -> None:
            if len(new) == 1:
                database.dialect.enqueue(session, new[0], database.database_id)
            elif new:
                database.dialect.enqueue_many(session, new, database.database_id)

        self.defer(database, write)

    def defer(self, database: Database, verb: Callable[[Session], object]) -> None:
        """``verb`` runs with the commit, after what was added before."""
        with failures(database):
            place = self._place()
        self._waiting.append((place, database, verb))

    def flush(self, connection: sqlalchemy.Connection, *details: Any) -> None:
        """Inside the greenlet of the caller's commit, before COMMIT is sent. A commit that fails here ends as a failing COMMIT does,
        rolled back: SQLAlchemy takes the transaction for ended, and ``rollback()`` on a connection would send nothing more."""
        try:
            self._write(connection)
        except BaseException as error:
            _roll_back(connection, error.__cause__)
            raise

    def _write(self, connection: sqlalchemy.Connection) -> None:
        waiting, self._waiting = self._waiting, []
        for _, database, verb in waiting:
            with failures(database):
                session = reach_sqlalchemy(connection)
                check_database(database, session)
                verb(session)

    def forget(self, gone: Callable[[Any], bool]) -> None:
        self._waiting = [entry for entry in self._waiting if not gone(entry[0])]

    def move(self, new_place: Callable[[Any], Any]) -> None:
        self._waiting = [(new_place(place), database, verb) for place, database, verb in self._waiting]

    def clear(self, *details: Any) -> None:
        self._waiting = []


class Gathered(Buffer):
    """Jobs that one transaction of our own writes, all at once and on that database only."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.dialect.name, lambda: None)
        self._database = database
        self.holds_lock = database.dialect.probes
        self._steps: list[NewJob | Callable[[Session], object]] = []
        self.jobs = 0
        """How many wait."""

    def add(self, database: Database, new: Sequence[NewJob]) -> None:
        self._check(database)
        self._steps += new
        self.jobs += len(new)

    def defer(self, database: Database, verb: Callable[[Session], object]) -> None:
        self._check(database)
        self._steps.append(verb)

    def _check(self, database: Database) -> None:
        """Raises DifferentDatabase. The ids are known: a block looks for the tables before it takes anything."""
        if database is not self._database and database.database_id != self._database.database_id:
            raise DifferentDatabase(different_database())

    def forget_after(self, jobs: int) -> None:
        """Only the first ``jobs`` are to be written; what was declared meanwhile stays, since kombu remembers it."""
        kept: list[NewJob | Callable[[Session], object]] = []
        left = self.jobs = min(jobs, self.jobs)
        for step in self._steps:
            if isinstance(step, NewJob):
                left -= 1
                if left < 0:
                    continue
            kept.append(step)
        self._steps = kept

    @property
    def empty(self) -> bool:
        return not self._steps

    def write(self, session: Session) -> None:
        """It may be asked again, where the transaction was rolled back."""
        for is_job, group in groupby(self._steps, key=lambda step: isinstance(step, NewJob)):
            if is_job:
                self._database.dialect.insert_due(session, cast("list[NewJob]", list(group)))
            else:
                for verb in cast("Iterator[Callable[[Session], object]]", group):
                    verb(session)


_KEPT = "dbqueue.buffer"
_buffers: weakref.WeakKeyDictionary[sqlalchemy.Connection, Buffer] = weakref.WeakKeyDictionary()


def buffer_of(given: Any) -> Buffer | None:
    """The buffer of an AsyncSession or AsyncConnection, always the same for one; None for everything else."""
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return None
    from sqlalchemy.ext import asyncio as extension

    if isinstance(given, extension.async_scoped_session):
        given = given()
    if isinstance(given, extension.AsyncConnection):
        if given.sync_connection is None:
            raise NotSupported("the AsyncConnection given to using(...) is not open yet: await it, or use `async with`")
        return _one(given.sync_connection)
    if isinstance(given, extension.AsyncSession):
        bind = bind_of(given.sync_session)
        if isinstance(bind, sqlalchemy.Connection):  # then the connection's transaction decides, not the session's
            return _one(bind)
        kept = given.sync_session.info  # a place refers to its session: a table of weak keys would keep both for ever
        if _KEPT not in kept:
            kept[_KEPT] = _of_session(given.sync_session)
        return cast(Buffer, kept[_KEPT])
    return None


def _one(connection: sqlalchemy.Connection) -> Buffer:
    if connection not in _buffers:
        _buffers[connection] = _of_connection(connection)
    return _buffers[connection]


def _of_session(session: orm.Session) -> Buffer:
    bind, reference = bind_of(session), weakref.ref(session)

    def innermost(owner: orm.Session) -> Any:
        return owner.get_nested_transaction() or owner.get_transaction()

    def place() -> Any:
        owner = reference()
        assert owner is not None
        if _commits_each_statement(bind_of(owner)):
            raise NotInTransaction(AUTOCOMMIT)
        if not owner.in_transaction():
            if not owner.autobegin:
                raise NotInTransaction("the AsyncSession given to using(...) has autobegin=False and has not begun")
            owner.begin()  # as any statement would; nothing is sent
        return innermost(owner)

    def before_commit(owner: orm.Session) -> None:
        # Also when a savepoint is released: an outer commit that finds it open tells of itself only here, before it.
        if not buffer.empty:
            connection = owner.connection()
            if not event.contains(connection, "commit", buffer.flush):
                for name in ("commit", "prepare_twophase", "commit_twophase"):
                    _listen(connection, name, buffer.flush)

    def after_rollback(owner: orm.Session) -> None:
        gone = innermost(owner)
        buffer.forget(lambda place: place is gone or not owner.in_nested_transaction())

    def after_transaction_end(owner: orm.Session, ended: orm.SessionTransaction) -> None:
        if ended.parent is None:  # committed, and so flushed; or closed without
            buffer.clear()
        else:
            buffer.move(lambda place: ended.parent if place is ended else place)

    buffer = Buffer(bind.dialect.name, place)
    for listener in (before_commit, after_rollback, after_transaction_end):
        event.listen(session, listener.__name__, listener)
    return buffer


def _of_connection(connection: sqlalchemy.Connection) -> Buffer:
    """A connection's savepoints form a stack, so a place is its depth. SQLAlchemy's event for a new savepoint does not know its
    name; the statement does. A name that was not seen began before everything in the buffer."""
    stack: list[str] = []
    reference = weakref.ref(connection)

    def place() -> int:
        owner = reference()
        assert owner is not None
        if not owner.in_transaction():
            if owner.dispatch.begin:  # an event of the caller's, which may want to send its own BEGIN
                raise NotInTransaction(
                    "the AsyncConnection given to using(...) has no transaction open: `await connection.begin()` first"
                )
            owner.begin()  # as any statement would; without it ``commit()`` does nothing
        check_async(owner.connection.dbapi_connection)
        return len(stack)

    def before_cursor_execute(
        owner: sqlalchemy.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        match = _SAVEPOINT.match(statement)
        if match is None:
            return
        verb, name = match[1].upper(), match[2].strip('"').lower()
        if verb == "SAVEPOINT":
            stack.append(name)
            return
        depth = max((n for n, known in enumerate(stack) if known == name), default=-1)
        if verb.startswith("ROLLBACK"):
            del stack[depth + 1 :]  # the savepoint itself stays
            buffer.forget(lambda place: place > depth)
        else:
            del stack[max(depth, 0) :]
            buffer.move(lambda place: min(place, max(depth, 0)))

    def rollback(owner: sqlalchemy.Connection) -> None:
        stack.clear()
        buffer.clear()

    def commit(owner: sqlalchemy.Connection) -> None:
        stack.clear()
        buffer.flush(owner)

    buffer = Buffer(connection.dialect.name, place)
    for listener in (commit, rollback, before_cursor_execute):
        _listen(connection, listener.__name__, listener)
    return buffer


def _listen(connection: sqlalchemy.Connection, name: str, listener: Callable[..., None]) -> None:
    try:
        event.listen(connection, name, listener)
    except sqlalchemy.exc.InvalidRequestError as error:
        raise NotSupported(
            "SQLAlchemy before 2.0.37 does not tell of the commits of an engine that was given execution_options: update it"
        ) from error


def _roll_back(connection: sqlalchemy.Connection, cause: Any) -> None:
    try:
        lost = connection.dialect.is_disconnect(cause, connection.connection.dbapi_connection, None)
        if not lost:
            connection.connection.rollback()
    except Exception:
        lost = True
    if lost:  # or the pool would hand it to the next one
        connection.invalidate()


def _commits_each_statement(bind: sqlalchemy.Engine | sqlalchemy.Connection) -> bool:
    """What the engine says; what a session asked for its own connection is seen when the jobs are written."""
    asked = bind.get_execution_options().get("isolation_level")
    return (asked or getattr(bind.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT"
