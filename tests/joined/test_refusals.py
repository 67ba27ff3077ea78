"""What ``using`` does not join: autocommit, another database, missing tables, foreign objects. Nothing is written anywhere."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import psycopg2
import pytest
import sqlalchemy
from sqlalchemy import orm

from dbqueue import (
    Closed,
    DBQueue,
    DifferentDatabase,
    EnqueueFailed,
    InvalidArgument,
    NotInTransaction,
    NotSupported,
    SchemaMissing,
    SchemaTooNew,
    using,
)
from tests.joined.callers import Kind, django_wrapper, engine_of
from tests.joined.shop import Order, Shop
from tests.servers import Server

pytestmark = pytest.mark.req("D5")


def refused(shop: Shop, given: Any, error: type[Exception], **more: Any) -> None:
    with using(given):
        with pytest.raises(error, **more):
            shop.ship.enqueue(Order(1))
        with pytest.raises(error, **more):
            shop.ship.enqueue_many([Order(1), Order(2)], keys=["a", "b"])


# -- autocommit --------------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
def test_a_driver_in_autocommit_mode_is_refused(shop: Shop) -> None:
    for connect in (psycopg.connect, psycopg2.connect):
        with closing(connect(shop.url)) as connection:
            connection.autocommit = True
            refused(shop, connection, NotInTransaction, match="autocommit")
    assert shop.jobs() == []


@pytest.mark.databases("postgres")
def test_a_transaction_in_autocommit_mode_is_joined(shop: Shop) -> None:
    with psycopg.connect(shop.url, autocommit=True) as connection:
        with using(connection), connection.transaction():
            shop.ship.enqueue(Order(1))
        with using(connection), connection.transaction(force_rollback=True):
            shop.ship.enqueue(Order(2))
        refused(shop, connection, NotInTransaction)
    assert shop.jobs() == [1]


@pytest.mark.databases("sqlite")
def test_sqlite3_without_begin_is_refused(shop: Shop) -> None:
    with closing(sqlite3.connect(shop.path, isolation_level=None)) as connection:
        refused(shop, connection, NotInTransaction, match="BEGIN")
        if sys.version_info >= (3, 12):
            connection.autocommit = True
            refused(shop, connection, NotInTransaction)
    assert shop.jobs() == []


def test_sqlalchemy_in_autocommit_mode_is_refused(shop: Shop) -> None:
    for driver in ("psycopg", "psycopg2") if shop.postgres else ("",):
        engine = engine_of(shop, driver)
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        with autocommit.connect() as connection:
            refused(shop, connection, NotInTransaction)
            assert not connection.in_transaction()  # what was begun to look is ended again
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            refused(shop, connection, NotInTransaction)
        with orm.Session(autocommit) as session:
            refused(shop, session, NotInTransaction)
        engine.dispose()
        engine = engine_of(shop, driver, isolation_level="AUTOCOMMIT")
        with orm.Session(engine) as session:
            refused(shop, session, NotInTransaction)
        engine.dispose()
    assert shop.jobs() == []


def test_a_session_that_does_not_begin_by_itself_is_refused(shop: Shop) -> None:
    engine = engine_of(shop)
    with orm.Session(engine, autobegin=False) as session:
        refused(shop, session, NotInTransaction, match=r"session\.begin\(\)")
        with session.begin(), using(session):
            shop.ship.enqueue(Order(1))
    engine.dispose()
    assert shop.jobs() == [1]


def test_django_outside_of_atomic_is_refused(shop: Shop) -> None:
    from django.db import transaction

    wrapper = django_wrapper(shop)
    refused(shop, wrapper, NotInTransaction, match="atomic")
    refused(shop, "django:default", NotInTransaction)
    with using("django:default"):
        with transaction.atomic():
            shop.ship.enqueue(Order(1))
        with pytest.raises(NotInTransaction):
            shop.ship.enqueue(Order(2))
        wrapper.set_autocommit(False)
        shop.ship.enqueue(Order(3))
        wrapper.rollback()
        wrapper.set_autocommit(True)
    with transaction.atomic(), using("django:default"):
        transaction.set_rollback(True)  # Django will roll back whatever comes now
        with pytest.raises(EnqueueFailed, match="roll it back"):
            shop.ship.enqueue(Order(4))
    wrapper.close()
    assert shop.jobs() == [1]


# -- another database --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("migrated", [True, False], ids=["with tables", "without tables"])
def test_another_database_is_refused(shop: Shop, make_shop: Callable[..., Shop], kind: Kind, migrated: bool) -> None:
    other = make_shop(migrated=migrated)
    if migrated:  # even where a job of this name and key is waiting
        other.ship.enqueue(Order(7), key="a")
    caller = kind.open(other)
    caller.order(1)
    refused(shop, caller.given, DifferentDatabase)
    with using(caller.given):
        with pytest.raises(DifferentDatabase):
            shop.ship.enqueue(Order(1), key="a")
        mine = shop_job(shop)
        for verb in (shop.queue.cancel, shop.queue.retry, shop.queue.get_job):
            with pytest.raises(DifferentDatabase):
                verb(mine)
        with pytest.raises(DifferentDatabase):
            shop.queue.jobs()
    caller.commit()  # a refusal is no reason for the caller's own rows to go
    caller.close()
    assert shop.both() == ([], [99])
    assert other.orders() == [1]
    if migrated:
        assert other.jobs() == [7]


def shop_job(shop: Shop) -> Any:
    """A job of the shop's own database, written by a thread that is in no block."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(shop.ship.enqueue(Order(99)).id))
    thread.start()
    thread.join()
    return made[0]


@pytest.mark.databases("postgres")
def test_a_copy_of_the_database_is_another_one(shop: Shop, postgres: Server, make_shop: Callable[..., Shop]) -> None:
    original = make_shop()
    name = sqlalchemy.make_url(original.url).database
    original.close()  # a template must have no sessions
    copy = postgres.create_database(template=str(name))
    queue = DBQueue(original.url)
    try:
        with closing(psycopg.connect(postgres.dsn(copy))) as connection:
            given = using(connection)
            with given, pytest.raises(DifferentDatabase):
                queue.send("mail", 1)
    finally:
        queue.close()
        postgres.drop_database(copy)


@pytest.mark.databases("sqlite")
def test_a_copy_of_the_file_is_another_one(shop: Shop, tmp_path: Path) -> None:
    namesake = tmp_path / os.path.basename(shop.path)
    with closing(shop.connect()) as source, closing(sqlite3.connect(namesake)) as copy:
        source.backup(copy)
        refused(shop, copy, DifferentDatabase)
        copy.execute("BEGIN")
        refused(shop, copy, DifferentDatabase)


@pytest.mark.databases("sqlite")
def test_other_names_of_the_file_are_the_same(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(shop.path)
    monkeypatch.chdir(Path(shop.path).parent)
    names = [str(link), os.path.basename(shop.path), f"file:{shop.path}?mode=rw"]
    for number, name in enumerate(names):
        with closing(sqlite3.connect(name, uri=name.startswith("file:"))) as connection:
            with using(connection):
                shop.ship.enqueue(Order(number))
            connection.commit()
    assert shop.jobs() == [0, 1, 2]


@pytest.mark.databases("sqlite")
def test_an_attached_file_does_not_count(shop: Shop, tmp_path: Path) -> None:
    """Two files do not commit together in WAL mode, whichever of them is the main one."""
    for main in (":memory:", str(tmp_path / "main.db")):
        with closing(sqlite3.connect(main)) as connection:
            connection.execute("ATTACH ? AS shop", (shop.path,))
            refused(shop, connection, DifferentDatabase)
            connection.commit()
    assert shop.jobs() == []


@pytest.mark.databases("postgres")
def test_a_caller_of_the_other_family_is_refused(shop: Shop, tmp_path: Path) -> None:
    lite = Shop(f"sqlite:///{tmp_path / 'lite.db'}")
    with closing(lite.connect()) as connection, closing(shop.connect()) as other:
        refused(shop, connection, DifferentDatabase)
        refused(lite, other, DifferentDatabase)
        engine = engine_of(shop)
        with orm.Session(engine) as session:
            refused(lite, session, DifferentDatabase)
        engine.dispose()
        connection.commit()
        other.commit()
    assert (shop.jobs(), lite.jobs()) == ([], [])
    lite.close()


# -- the schema --------------------------------------------------------------------------------------------------------


@pytest.mark.req("D6")
def test_the_first_use_inside_a_transaction_creates_nothing(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(migrated=False, auto_migrate=True)
    with closing(shop.connect()) as connection:
        connection.execute("INSERT INTO orders VALUES (1)")
        with using(connection):
            for _ in range(2):
                with pytest.raises(SchemaMissing, match="dbqueue migrate"):
                    shop.ship.enqueue(Order(1))
            with pytest.raises(SchemaMissing):
                shop.queue.jobs()
            with pytest.raises(NotSupported, match="start-up"):
                shop.queue.migrate()
        connection.execute("INSERT INTO orders VALUES (2)")
        connection.commit()  # the caller's transaction is none the worse
    assert shop.orders() == [1, 2]
    assert tables(shop) == ["orders"]
    shop.queue.migrate()
    with closing(shop.connect()) as connection:
        with using(connection):
            shop.ship.enqueue(Order(3))
        connection.commit()
    assert shop.jobs() == [3]


def tables(shop: Shop) -> list[str]:
    if shop.postgres:
        return [row[0] for row in shop.look("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
    assert shop.look("PRAGMA journal_mode") == [("delete",)]  # that would be a change, too
    return [row[0] for row in shop.look("SELECT name FROM sqlite_master WHERE type = 'table'")]


@pytest.mark.req("D6")
@pytest.mark.databases("sqlite")
def test_a_file_that_does_not_exist_is_not_created(shop: Shop, tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "queue.db", tmp_path / "queue.db"):
        queue = DBQueue(f"sqlite:///{path}")
        with closing(shop.connect()) as connection, using(connection), pytest.raises(SchemaMissing, match="migrate"):
            queue.send("mail", 1)
        queue.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.databases("sqlite")
def test_a_file_of_any_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a # b's \u00e9.db"
    shop = Shop(f"sqlite:///{path}")
    queue = DBQueue(shop.url)  # one that has not looked yet
    with closing(shop.connect()) as connection:
        with using(connection):
            queue.send("mail", {"number": 1})
        connection.commit()
    assert shop.jobs() == [1]
    queue.close()
    shop.close()


@pytest.mark.req("D6")
def test_a_schema_from_the_future_is_refused(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop()
    shop.look("INSERT INTO dbqueue_migrations VALUES (99, 'later', 0)")
    with closing(shop.connect()) as connection:
        refused(shop, connection, SchemaTooNew)


def test_a_closed_queue_is_closed_here_too(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop()
    shop.queue.close()
    with closing(shop.connect()) as connection:
        refused(shop, connection, Closed)


@pytest.mark.databases("postgres")
def test_a_queue_that_cannot_be_reached_is_no_reason_to_retry(shop: Shop, postgres: Server) -> None:
    """Not ConnectionLost, which a publisher's own retries would take for a reason to write once more."""
    url = sqlalchemy.make_url(shop.url).set(database="gone").render_as_string(hide_password=False)
    queue = DBQueue(url)
    password = sqlalchemy.make_url(shop.url).password
    with closing(shop.connect()) as connection, using(connection), pytest.raises(EnqueueFailed) as caught:
        queue.send("mail", 1)
    assert str(password) not in f"{caught.value} {caught.value.__cause__}"
    queue.close()


# -- objects that cannot be joined -------------------------------------------------------------------------------------


class _Elsewhere:
    """Looks like a connection, and is none that is known."""

    def cursor(self) -> None: ...


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    "given", [None, "sqlite:///app.db", 7, object(), _Elsewhere()], ids=lambda given: type(given).__name__
)
def test_other_objects_are_refused_at_once(given: Any) -> None:
    with pytest.raises(NotSupported, match=type(given).__name__), using(given):
        pass


def test_engines_and_sessions_without_one_are_refused_at_once(shop: Shop) -> None:
    engine = engine_of(shop)
    for given in (engine, orm.Session(), orm.Session(binds={_Elsewhere: engine})):
        with pytest.raises(NotSupported), using(given):
            pass
    django_wrapper(shop)
    with pytest.raises(InvalidArgument, match="no such alias"), using("django:replica"):
        pass
    engine.dispose()
