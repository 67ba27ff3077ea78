"""Everything that an application may hand to ``using``, behind one face: a business row, a savepoint, the end of a transaction.

A ``Kind`` says on which databases it exists. Each is opened as its documentation says, with the driver's own defaults.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import psycopg2
import sqlalchemy
from sqlalchemy import event, orm

from tests.joined.shop import Shop

POSTGRES = ("postgres", "postgres15")
SQLITE = ("sqlite",)


@dataclass
class Caller:
    """``given`` goes to ``using``. ``execute`` runs a statement of the application in its transaction."""

    given: Any
    execute: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    close: Callable[[], Any] = lambda: None
    begin: Callable[[], Any] = lambda: None
    """For callers that begin by hand: a fresh one has begun already."""
    _savepoints: int = field(default=0, init=False)

    def order(self, number: int) -> None:
        self.execute(f"INSERT INTO orders VALUES ({number})")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Released at its end, rolled back by a ``Back``, which ends here."""
        self._savepoints += 1
        name = f"mine{self._savepoints}"
        self.execute(f"SAVEPOINT {name}")
        try:
            yield
        except Back:
            self.execute(f"ROLLBACK TO SAVEPOINT {name}")
        else:
            self.execute(f"RELEASE SAVEPOINT {name}")


class Back(Exception):
    """Rolls back the savepoint that it leaves."""


@dataclass(frozen=True)
class Kind:
    name: str
    databases: tuple[str, ...]
    open: Callable[[Shop], Caller]

    def __str__(self) -> str:
        return self.name


# -- SQLAlchemy --------------------------------------------------------------------------------------------------------


class _Nesting(Caller):
    """Savepoints by SQLAlchemy's own ``begin_nested``."""

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        try:
            with self.given.begin_nested():
                yield
        except Back:
            pass


def engine_of(shop: Shop, driver: str = "psycopg", **options: Any) -> sqlalchemy.Engine:
    url = sqlalchemy.make_url(shop.url)
    return sqlalchemy.create_engine(
        url.set(drivername=f"postgresql+{driver}" if shop.postgres else "sqlite"), **options
    )


def _begins(engine: sqlalchemy.Engine) -> sqlalchemy.Engine:
    """The documented recipe for SQLite: the driver begins nothing, SQLAlchemy says BEGIN."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _session(driver: str) -> Callable[[Shop], Caller]:
    def opened(shop: Shop) -> Caller:
        engine = engine_of(shop, driver)
        session = orm.Session(engine)
        return _nesting(session, engine)

    return opened


def _nesting(given: Any, engine: sqlalchemy.Engine) -> Caller:
    def close() -> None:
        given.close()
        engine.dispose()

    return _Nesting(given, lambda text: given.execute(sqlalchemy.text(text)), given.commit, given.rollback, close)


def _connection(driver: str) -> Callable[[Shop], Caller]:
    def opened(shop: Shop) -> Caller:
        engine = engine_of(shop, driver)
        return _nesting(engine.connect(), engine)

    return opened


def _scoped_session(shop: Shop) -> Caller:
    engine = engine_of(shop)
    return _nesting(orm.scoped_session(orm.sessionmaker(engine)), engine)


def _recipe_session(shop: Shop) -> Caller:
    engine = _begins(engine_of(shop))
    return _nesting(orm.Session(engine), engine)


def _recipe_connection(shop: Shop) -> Caller:
    engine = _begins(engine_of(shop))
    return _nesting(engine.connect(), engine)


# -- drivers -----------------------------------------------------------------------------------------------------------


def _psycopg(shop: Shop) -> Caller:
    connection = psycopg.connect(shop.url)
    return Caller(connection, connection.execute, connection.commit, connection.rollback, connection.close)


def _psycopg_by_hand(shop: Shop) -> Caller:
    """In autocommit mode, with a transaction that was begun by statement."""
    connection = psycopg.connect(shop.url, autocommit=True)

    def execute(text: str) -> Any:
        return connection.execute(text)

    execute("BEGIN")
    return Caller(
        connection,
        execute,
        lambda: execute("COMMIT"),
        lambda: execute("ROLLBACK"),
        connection.close,
        lambda: execute("BEGIN"),
    )


def _psycopg2(shop: Shop) -> Caller:
    connection = psycopg2.connect(shop.url)

    def execute(text: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(text)

    return Caller(connection, execute, connection.commit, connection.rollback, connection.close)


def _sqlite3(shop: Shop) -> Caller:
    connection = sqlite3.connect(shop.path)
    return Caller(connection, connection.execute, connection.commit, connection.rollback, connection.close)


def _sqlite3_by_hand(begin: str) -> Callable[[Shop], Caller]:
    def opened(shop: Shop) -> Caller:
        connection = sqlite3.connect(shop.path, isolation_level=None)
        connection.execute(begin)
        execute = connection.execute
        return Caller(
            connection,
            execute,
            lambda: execute("COMMIT"),
            lambda: execute("ROLLBACK"),
            connection.close,
            lambda: execute(begin),
        )

    return opened


def _sqlite3_autocommit_false(shop: Shop) -> Caller:
    connection = sqlite3.connect(shop.path, autocommit=False)
    return Caller(connection, connection.execute, connection.commit, connection.rollback, connection.close)


# -- Django ------------------------------------------------------------------------------------------------------------


class _Atomic:
    """``transaction.atomic()`` as begin, commit and rollback."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.begin()

    def begin(self) -> None:
        from django.db import transaction

        self.atomic = transaction.atomic(using=self.alias)
        self.atomic.__enter__()

    def commit(self) -> None:
        self.atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        self.atomic.__exit__(Back, Back(), None)


class _DjangoCaller(Caller):
    alias = "default"

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        from django.db import transaction

        try:
            with transaction.atomic(using=self.alias):
                yield
        except Back:
            pass


def django_wrapper(shop: Shop) -> Any:
    """Django's own connection to the shop's database, as its alias ``default``."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure(USE_TZ=True)
        django.setup()
    if shop.postgres:
        url = sqlalchemy.make_url(shop.url)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": url.database,
            "USER": url.username,
            "PASSWORD": url.password,
            "HOST": url.host,
            "PORT": url.port,
        }
    else:
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": shop.path}
    for alias in list(connections):
        connections[alias].close()
        del connections[alias]
    connections.settings = connections.configure_settings({"default": database})
    return connections["default"]


def _django(given: Callable[[Any], Any]) -> Callable[[Shop], Caller]:
    def opened(shop: Shop) -> Caller:
        wrapper = django_wrapper(shop)
        atomic = _Atomic("default")

        def execute(text: str) -> None:
            with wrapper.cursor() as cursor:
                cursor.execute(text)

        def close() -> None:
            if wrapper.in_atomic_block:
                atomic.rollback()
            wrapper.close()

        return _DjangoCaller(given(wrapper), execute, atomic.commit, atomic.rollback, close, atomic.begin)

    return opened


def _proxy(wrapper: Any) -> Any:
    from django.db import connection

    return connection


def kinds(*names: str) -> list[Kind]:
    return [kind for kind in KINDS if kind.name in names]


KINDS = [
    Kind("session+psycopg", POSTGRES, _session("psycopg")),
    Kind("session+psycopg2", POSTGRES, _session("psycopg2")),
    Kind("session", SQLITE, _session("")),
    Kind("session+recipe", SQLITE, _recipe_session),
    Kind("scoped_session", POSTGRES + SQLITE, _scoped_session),
    Kind("connection+psycopg", POSTGRES, _connection("psycopg")),
    Kind("connection+psycopg2", POSTGRES, _connection("psycopg2")),
    Kind("connection", SQLITE, _connection("")),
    Kind("connection+recipe", SQLITE, _recipe_connection),
    Kind("psycopg", POSTGRES, _psycopg),
    Kind("psycopg+begin", POSTGRES, _psycopg_by_hand),
    Kind("psycopg2", POSTGRES, _psycopg2),
    Kind("sqlite3", SQLITE, _sqlite3),
    Kind("sqlite3+begin", SQLITE, _sqlite3_by_hand("BEGIN")),
    Kind("sqlite3+immediate", SQLITE, _sqlite3_by_hand("BEGIN IMMEDIATE")),
    Kind("django-alias", POSTGRES + SQLITE, _django(lambda wrapper: f"django:{wrapper.alias}")),
    Kind("django-wrapper", POSTGRES + SQLITE, _django(lambda wrapper: wrapper)),
    Kind("django-proxy", POSTGRES + SQLITE, _django(_proxy)),
]
if sys.version_info >= (3, 12):
    KINDS.append(Kind("sqlite3+autocommit=False", SQLITE, _sqlite3_autocommit_false))
