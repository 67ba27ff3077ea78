"""Joining the caller's transaction: ``with dbqueue.using(session): ...`` (D5, C5).

Inside the block every write of dbqueue goes through the caller's own physical connection, so job and business row commit
together or not at all; savepoints included. dbqueue never begins, commits or rolls back there, never retries and never falls
back to another connection: an error leaves as EnqueueFailed, and the caller rolls back.

``callers`` knows how to reach the connection of whatever ``using`` was given; ``buffered`` stands in for async SQLAlchemy, whose
jobs are written by its own commit, and for whoever gathers messages to write them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from dbqueue.database.buffered import Buffer, Gathered, buffer_of
from dbqueue.database.callers import Caller, caller_of, check_database, failures, in_django_transaction
from dbqueue.database.dialect import Session
from dbqueue.database.sqlite import different_database
from dbqueue.errors import DatabaseError, DifferentDatabase, EnqueueFailed, TransactionClosed

if TYPE_CHECKING:
    from dbqueue.database.engine import Database

__all__ = ["Block", "current", "failures", "using"]

_current: ContextVar[Block | None] = ContextVar("dbqueue_using", default=None)


class Block:
    """One ``using`` block. Whoever inherited it (a thread, a task) and uses it after its end gets TransactionClosed."""

    def __init__(self, caller: Caller | Buffer, outer: Block | None) -> None:
        self._caller: Caller | Buffer | None = caller
        self.outer = outer
        self._on_end: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        return self._caller is None

    @property
    def buffer(self) -> Buffer | None:
        """Where jobs wait for an async session's commit; None: they are written at once."""
        return self._caller if isinstance(self._caller, Buffer) else None

    @property
    def gathers(self) -> bool:
        """What is published belongs to a cursor, so that every task's message joins, even through an exchange that is not durable."""
        return isinstance(self._caller, Gathered)

    def check(self, database: Database) -> None:
        """Everything that can be told without the caller's connection. Raises TransactionClosed, DifferentDatabase, SchemaMissing."""
        if self._caller is None:
            raise TransactionClosed(
                "the using(...) block that this thread, task or coroutine inherited has ended; enqueue inside the block, or start "
                "the thread or task outside of it"
            )
        if self._caller.family != database.dialect.name:
            raise DifferentDatabase(different_database())
        try:
            database.check_ready()
        except DatabaseError as error:
            raise EnqueueFailed(
                f"dbqueue could not look at its tables before writing the job: {type(error).__name__}. Nothing was written"
            ) from error

    def session(self, database: Database) -> Session:
        """The caller's connection, checked: in a transaction, and of the queue's own database."""
        assert isinstance(self._caller, Caller)
        session = self._caller.reach()
        check_database(database, session)
        return session

    def notice(self, database: Database) -> None:
        """Before a write beside the caller's transaction: on SQLite it then fails at once (WouldDeadlock) rather than wait for the lock
        that this very thread holds. Whatever is wrong with the caller's connection is said when it is joined."""
        if isinstance(self._caller, Caller):
            with suppress(Exception):
                self.session(database)

    def at_end(self, call: Callable[[], None]) -> None:
        """``call`` runs when the block ends, however it ends; whether its transaction commits is not known by then."""
        if call not in self._on_end:
            self._on_end.append(call)

    def close(self) -> None:
        """Lets go of the caller's connection too: a thread that inherited the block may keep it for long."""
        self._caller = None
        for call in self._on_end:
            call()


def current() -> Block | None:
    """The innermost block that this thread or task is in, or inherited."""
    return _current.get()


@contextmanager
def using(connection: Any) -> Iterator[None]:
    """Joins the transaction of ``connection`` until the block ends; never begins, commits or rolls it back.

    ``connection`` is a SQLAlchemy Session or Connection (sync or async), a psycopg 2 or 3 connection, a sqlite3 connection, or a
    Django connection or its alias as ``"django:default"``. Blocks nest; the innermost counts. If the process dies before the
    caller's COMMIT, neither rows nor jobs exist. Raises NotSupported for other objects; enqueueing in the block raises
    NotInTransaction, DifferentDatabase, TransactionTooOld (SQLite) or EnqueueFailed (D5)."""
    with _entered(buffer_of(connection) or caller_of(connection)):
        yield


@contextmanager
def gathering(gathered: Gathered) -> Iterator[None]:
    """What is enqueued or published in the block waits in memory; whoever gathers it writes it, in a transaction of his own."""
    with _entered(gathered):
        yield


@contextmanager
def _entered(caller: Caller | Buffer) -> Iterator[None]:
    block = Block(caller, _current.get())
    _current.set(block)
    try:
        yield
    finally:
        block.close()
        _leave(block)


@contextmanager
def joining(name: str | None) -> Iterator[None]:
    """``using(name)`` if ``name`` is Django's alias with a transaction open, and no block is entered already; else nothing."""
    if name is None or _current.get() is not None or not in_django_transaction(name):
        yield
        return
    with using(name):
        yield


def _leave(block: Block) -> None:
    """Instead of ContextVar.reset: generators may leave their blocks in another order, or another context, than they entered them."""
    inner = _current.get()
    if inner is block:
        _current.set(block.outer)
    while inner is not None:
        if inner.outer is block:
            inner.outer = block.outer
        inner = inner.outer
