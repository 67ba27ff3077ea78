"""dbqueue's own way to the database: the URL, the dialect, a small pool, and transactions that are ours.

Everything that begins, commits or rolls back is here; verbs only run on what they are given. A driver's error leaves as one of
ours, chosen by its code: ConnectionLost discards the connection (and, when the server itself went away or turned read-only,
every pooled one), DatabaseBusy keeps it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import pool

from dbqueue.clock import POSTGRES_NOW, SQLITE_NOW, Clock
from dbqueue.database import migrate
from dbqueue.database.dialect import Dialect, OwnSession, Session
from dbqueue.database.migrate import Migration
from dbqueue.database.postgres import DENIALS, Postgres, refusal
from dbqueue.database.sqlite import Sqlite
from dbqueue.database.tables import Names
from dbqueue.database.wakeup import BELL, DataVersion, Listener, Sleeper
from dbqueue.errors import Closed, ConfigError, ConnectionLost, DatabaseBusy, QueueError, SchemaMissing

T = TypeVar("T")

BUSY_TRIES = 5
"""How often a transaction of our own is begun again after a deadlock or a serialization conflict."""
BUSY_PATIENCE = 5.0
"""Seconds after which it is not begun again: it waited for a lock, and whoever holds that is in no hurry."""

_POSTGRES_NAMES = {"postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg"}
_SQLITE_NAMES = {"sqlite", "sqlite+pysqlite", "sqlite+aiosqlite"}


def parse_url(text: str) -> sqlalchemy.URL:
    """Accepts a SQLAlchemy URL of any driver of a database that dbqueue knows, with or without ``dbqueue+`` before it.
    The text never appears in an error: it may hold a password."""
    try:
        url = sqlalchemy.make_url(text.removeprefix("dbqueue+"))
        names = _POSTGRES_NAMES | _SQLITE_NAMES
    except Exception:
        raise ConfigError(
            "the database URL cannot be read; write postgresql://user:password@host/database or sqlite:///file.db "
            "(percent-encode special characters in the password)"
        ) from None
    if url.drivername not in names:
        raise ConfigError(
            f"the database URL begins with {url.drivername!r}, which dbqueue does not know; it takes postgresql:// and sqlite:///"
        )
    return url.set(drivername="postgresql" if url.drivername in _POSTGRES_NAMES else "sqlite")


class Database:
    """One database as one process sees it. Thread-safe; a forked child starts with an empty pool of its own."""

    def __init__(
        self,
        url: str,
        *,
        schema: str = "public",
        prefix: str = "dbqueue_",
        pool_size: int = 5,
        auto_migrate: bool = True,
        notify: bool = True,
        listen_url: str | None = None,
        keep_payload: bool = False,
        clock: Clock | None = None,
    ) -> None:
        parsed = parse_url(url)
        parsed, schema, prefix = _own_options(parsed, schema, prefix)
        self.clock = clock or Clock()
        self.url, self.listen_url = parsed, parse_url(listen_url) if listen_url else parsed
        self.auto_migrate, self.notify, self._pool_size = auto_migrate, notify, pool_size
        self.dialect: Dialect
        if parsed.drivername == "sqlite":
            self.dialect = Sqlite(parsed, Names(prefix), self.clock, keep=keep_payload)
        else:
            self.dialect = Postgres(parsed, Names(prefix, schema), self.clock, notify=notify, keep=keep_payload)
        self._lock = threading.RLock()
        self._pool: pool.Pool | None = None
        self._pid = os.getpid()
        self._in_use = self._most_in_use = 0
        """Pooled connections: now, and the most since the last look for idle ones."""
        self.pooled: Callable[[], None] = _nothing
        """Called when a pooled connection is made, for somebody who closes them when they are idle."""
        self._ready = False
        self._closed = False
        self._database_id: str | None = None

    @property
    def label(self) -> str:
        """The URL without password and options, for people."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    def __repr__(self) -> str:
        return f"<Database {self.label}>"

    # -- connections -------------------------------------------------------------------------------------------------

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Driver errors leave as ours; the text is the driver's class and code, never its message (it may quote a row)."""
        try:
            yield
        except QueueError:
            raise
        except Exception as error:
            if isinstance(error, sqlalchemy.exc.TimeoutError):
                raise DatabaseBusy(
                    "every pooled connection is in use; raise the pool's size or use fewer threads"
                ) from error
            kind = self.dialect.classify(error)
            if kind is None:
                raise
            raise kind(_describe(error, kind)) from error

    def open_session(self) -> OwnSession:
        """A connection outside the pool, for a worker; the caller closes it."""
        self._check_open()
        with self.errors():
            return self.dialect.session(self.dialect.connect())

    def sleeper(self, session: OwnSession, queues: tuple[str, ...]) -> Sleeper | None:
        """What wakes a worker on these queues before its poll; None: notification is switched off."""
        if isinstance(self.dialect, Postgres):
            return self.listener(queues)
        also = self.dialect.mail_session() if any(queue.startswith(BELL) for queue in queues) else None
        return DataVersion(session, also)

    def listener(self, queues: tuple[str, ...]) -> Listener | None:
        assert isinstance(self.dialect, Postgres)
        with self.errors():
            return Listener(self.dialect, self.dialect.names, self.listen_url, queues) if self.notify else None

    @contextmanager
    def session(self) -> Iterator[OwnSession]:
        """A pooled connection in autocommit mode."""
        self._check_open()
        with self.errors(), self._pool_in_use() as connections:
            fairy = connections.connect()
            try:
                yield self.dialect.session(fairy.dbapi_connection)
            except BaseException as error:
                self._discard(fairy, error)
                raise
            finally:
                fairy.close()

    @contextmanager
    def _pool_in_use(self) -> Iterator[pool.Pool]:
        with self._lock:
            connections = self._connections()
            self._in_use += 1
            self._most_in_use = max(self._most_in_use, self._in_use)
        pid = os.getpid()
        try:
            yield connections
        finally:
            if pid == os.getpid():
                with self._lock:
                    self._in_use -= 1
                    given_up = connections is not self._pool
                if given_up:  # meanwhile, and nobody else closes what came back to it
                    connections.dispose()

    def close_idle(self) -> bool:
        """Closes the pooled connections if more are open than were in use at once since the last call. True: none is open now."""
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                return True
            most, self._most_in_use = self._most_in_use, self._in_use
            if self._in_use or self._pool.checkedin() <= most:  # type: ignore[attr-defined]  # a QueuePool has it
                return False
            stale, self._pool = self._pool, None
        stale.dispose()
        return True

    def _discard(self, fairy: Any, error: BaseException) -> None:
        kind = self.dialect.classify(error) if not isinstance(error, QueueError) else type(error)
        if kind is not None and issubclass(kind, ConnectionLost):
            fairy.invalidate()
            with self._lock:  # its siblings lead to the same server: it restarted, or it is a standby now
                stale, self._pool = self._pool, None
            if stale is not None:
                stale.dispose()
        elif not isinstance(error, Exception):
            fairy.invalidate()  # interrupted in the middle of a statement

    @contextmanager
    def transaction(self) -> Iterator[OwnSession]:
        """One short transaction of our own; see ``run`` for the form that begins again on conflicts."""
        with self.session() as session:
            session.begin()
            try:
                yield session
                session.commit()
            except BaseException:
                roll_back(session)
                raise

    def run(self, verb: Callable[[OwnSession], T]) -> T:
        """Runs ``verb`` in a transaction of its own, again after a deadlock or serialization conflict. The COMMIT's answer may be
        lost with the connection: then ConnectionLost is raised and the caller has to look whether it was done."""
        return self._again(self.transaction, verb)

    def single(self, verb: Callable[[OwnSession], T]) -> T:
        """As ``run`` for a verb that is one round trip, and so one transaction: no BEGIN and COMMIT around it."""
        return self._again(self._statement, verb)

    @contextmanager
    def _statement(self) -> Iterator[OwnSession]:
        with self.session() as session:
            if session.guarded:
                session.begin()
            try:
                yield session
                if session.guarded:
                    session.commit()
            except BaseException:
                if session.guarded:
                    roll_back(session)
                raise

    def _again(self, scope: Callable[[], AbstractContextManager[OwnSession]], verb: Callable[[OwnSession], T]) -> T:
        began = time.monotonic()
        for attempt in range(BUSY_TRIES):
            try:
                with scope() as session:
                    return verb(session)
            except DatabaseBusy:
                patient = time.monotonic() - began < BUSY_PATIENCE
                if attempt == BUSY_TRIES - 1 or not patient or self.dialect.name == "sqlite":
                    raise
                time.sleep(random.uniform(0, 0.01 * 2**attempt))
        raise AssertionError("unreachable")

    def _connections(self) -> pool.Pool:
        with self._lock:
            if self._pid != os.getpid():  # sockets of the parent: neither used nor closed here
                self._pool, self._pid, self._in_use, self._most_in_use = None, os.getpid(), 0, 0
            if self._pool is None:
                self._pool = pool.QueuePool(
                    self._connect,
                    pool_size=self._pool_size,
                    max_overflow=0,
                    timeout=30,
                    reset_on_return=None,
                    use_lifo=True,
                )
            return self._pool

    def _connect(self) -> Any:
        connection = self.dialect.connect()
        self.pooled()
        return connection

    def grow_pool(self, size: int) -> None:
        """At least ``size`` connections may be open at once (D18: workers + 1 where handlers share the queue's pool)."""
        with self._lock:
            if size > self._pool_size:
                self._pool_size = size
                stale, self._pool = self._pool, None
                if stale is not None:
                    stale.dispose()

    def close(self) -> None:
        """Closes the pooled connections; every later call raises Closed."""
        with self._lock:
            self._closed = True
            if self._pool is not None and self._pid == os.getpid():
                self._pool.dispose()
            self._pool = None

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this queue was closed; make a new DBQueue")

    # -- schema ------------------------------------------------------------------------------------------------------

    def ready(self, own: OwnSession | None = None) -> None:
        """Once: the schema is there and of this version; made here where that is allowed (D6). ``own``: a session to look with, so
        that the pool stays empty."""
        if self._ready:
            return
        with self._lock:
            if self._ready:
                return
            with self.session() if own is None else self._errors_of(own) as session:
                if self.auto_migrate:
                    migrate.migrate(self.dialect, session)
                migrate.check(self.dialect, session)
                self._database_id = self.dialect.database_id(session)
            self._ready = True

    @contextmanager
    def _errors_of(self, own: OwnSession) -> Iterator[OwnSession]:
        with self.errors():
            yield own

    def check_ready(self) -> None:
        """As ``ready``, but never creates anything: this thread is inside a caller's transaction."""
        if not self._ready:
            self._check_open()
            with self._lock, self.errors():
                session = self.dialect.session(self.dialect.connect_to_look())
                try:
                    migrate.check(self.dialect, session)
                    self._database_id = self.dialect.database_id(session)
                finally:
                    session.close()
                self._ready = True

    def migrate(self) -> list[Migration]:
        """Applies pending migrations and returns them. Raises SchemaTooNew."""
        with self.session() as session:
            done = migrate.migrate(self.dialect, session)
        self._ready = False
        return done

    def pending_migrations(self) -> list[Migration]:
        with self.session() as session:
            return migrate.pending(self.dialect, session)

    def migration_script(self) -> str:
        now = SQLITE_NOW if self.dialect.name == "sqlite" else POSTGRES_NOW
        return migrate.script(self.dialect, self.pending_migrations(), now)

    @property
    def database_id(self) -> str:
        if self._database_id is None:
            raise SchemaMissing("dbqueue's tables are not in this database: run `dbqueue migrate`")
        return self._database_id

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, verb: Callable[[Session], T]) -> T:
        """Runs a reading verb on a pooled connection; once more on a fresh one when the pooled one had died."""
        connected = False
        try:
            with self.session() as session:
                connected = True
                return verb(session)
        except ConnectionLost:
            if not connected:  # a server that does not answer would only be waited for twice
                raise
            with self.session() as session:
                return verb(session)


def _nothing() -> None: ...


def _own_options(url: sqlalchemy.URL, schema: str, prefix: str) -> tuple[sqlalchemy.URL, str, str]:
    """``?schema=`` and ``?prefix=`` in the URL are ours; everything else goes to the driver."""
    own = {name: url.query[name] for name in ("schema", "prefix") if name in url.query}
    for name, value in own.items():
        if not isinstance(value, str):
            raise ConfigError(f"the database URL says {name}= more than once")
    return url.difference_update_query(list(own)), str(own.get("schema", schema)), str(own.get("prefix", prefix))


def _describe(error: BaseException, kind: type[QueueError]) -> str:
    code = (
        getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or getattr(error, "sqlite_errorname", None)
    )
    first = (kind.__doc__ or "").split("``__cause__``")[0].strip().replace("\n    ", " ")
    reason = None if code or kind is not ConnectionLost else refusal(error)
    return f"{first} ({type(error).__name__}{f' {code}' if code else ''}{f': {reason}' if reason else ''})"


def denial(error: ConnectionLost) -> str | None:
    """Why the server turned down who asked, in words of ours; None: it did not, or not in words that are known."""
    reason = None if error.__cause__ is None else refusal(error.__cause__)
    return reason if reason in DENIALS else None


def roll_back(session: OwnSession) -> None:
    with suppress(Exception):  # the first error is the one to tell; a dead connection is discarded by it
        session.rollback()
