"""The caller's settings do not reach our statements, and our statements do not reach the caller's cursors."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras
import pytest
import sqlalchemy
from psycopg import rows as psycopg_rows
from sqlalchemy import orm

from dbqueue import EnqueueFailed, using
from dbqueue.database.callers import caller_of
from tests.factory import new_job
from tests.joined.callers import Caller, engine_of, kinds
from tests.joined.shop import Order, Shop
from tests.waiting import wait_for

pytestmark = pytest.mark.req("D5")


def everything(shop: Shop, given: Any) -> None:
    """Each verb that reads an answer, so that a strange row or text would be noticed."""
    with using(given):
        kept = shop.ship.enqueue(Order(1), key="a")
        again = shop.ship.enqueue(Order(2), key="a")
        assert (kept.duplicate, again.duplicate, again.id) == (False, True, kept.id)
        many = shop.ship.enqueue_many([Order(3), Order(4), Order(5)], keys=["a", "b", "b"])
        assert [ref.duplicate for ref in many] == [True, False, True]
        assert many[0].id == kept.id
        assert many[1].id == many[2].id
        record = shop.queue.get_job(kept.id, with_payload=True)
        assert record is not None
        assert (record.target, record.key, record.queue, record.state) == ("shop.ship", "a", "default", "pending")
        assert record.payload is not None
        assert b'"number":1' in record.payload
        assert {found.key for found in shop.queue.jobs(target="shop.ship")} == {"a", "b"}
        assert [depth.queue for depth in shop.queue.queues()] == ["default"]
        assert shop.queue.cancel(kept.id) == "pending"
        assert shop.queue.retry(kept.id) == "cancelled"
        assert shop.queue.counts() == {"pending": 2}


def test_each_verb_for_each_kind_of_caller(shop: Shop, caller: Caller) -> None:
    everything(shop, caller.given)
    assert shop.jobs() == []
    caller.commit()
    assert shop.jobs() == [1, 4]


# -- psycopg -----------------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("rows", ["dict_row", "namedtuple_row", "scalar_row", "args_row"])
def test_row_factories_of_psycopg(shop: Shop, rows: str) -> None:
    factory: Any = getattr(psycopg_rows, rows)
    factory = factory(lambda *row: list(row)) if rows == "args_row" else factory
    with psycopg.connect(shop.url, row_factory=factory) as connection:
        everything(shop, connection)
        assert connection.row_factory is factory


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("cursor", ["ClientCursor", "RawCursor"])
def test_cursor_classes_of_psycopg(shop: Shop, cursor: str) -> None:
    with psycopg.connect(shop.url, cursor_factory=getattr(psycopg, cursor)) as connection:
        everything(shop, connection)


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("threshold", [0, 1, None])
def test_nothing_is_prepared_on_the_callers_connection(shop: Shop, threshold: int | None) -> None:
    with psycopg.connect(shop.url, prepare_threshold=threshold) as connection:
        everything(shop, connection)
        with using(connection):
            for number in range(10):
                shop.ship.enqueue(Order(number))
        found = connection.execute("SELECT statement FROM pg_prepared_statements", prepare=False).fetchall()
        assert [text for (text,) in found if "dbqueue" in text] == []


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])
def test_what_is_sent_for_a_job_without_a_key_is_short(shop: Shop, connect: Callable[..., Any]) -> None:
    """It is planned anew each time, and one with a key looks for the key's holder."""
    with closing(connect(shop.url)) as connection:
        asked = connection.cursor()
        asked.execute("SELECT pg_backend_pid()")
        (pid,) = asked.fetchone()
        sent = {}
        for key in ("a", None):
            with using(connection):
                shop.ship.enqueue(Order(1), key=key)
            ((sent[key],),) = shop.look(f"SELECT query FROM pg_stat_activity WHERE pid = {pid}")
    assert sent["a"].strip().startswith("WITH")
    assert sent[None].strip().startswith("INSERT INTO")


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])
def test_a_job_that_is_there_already_by_its_id(shop: Shop, connect: Callable[..., Any]) -> None:
    """Whoever makes ids himself may write twice: a function of a schedule's slot, say. The transaction goes on."""
    database, job = shop.queue.database, new_job(payload=b'{"number":1}')
    with closing(connect(shop.url)) as connection:
        session = caller_of(connection).reach()
        for _ in range(2):
            enqueued = database.dialect.enqueue(session, job)
            assert (enqueued.id, enqueued.duplicate) == (job.id, False)
        connection.commit()
    assert shop.jobs() == [1]


@pytest.mark.databases("postgres")
def test_an_error_past_the_cursor_is_the_drivers_own(shop: Shop) -> None:
    with psycopg.connect(shop.url) as connection:
        connection.execute("SET LOCAL statement_timeout = '200ms'")
        with closing(psycopg.connect(shop.url)) as other:
            other.execute("LOCK TABLE dbqueue_jobs")
            with using(connection), pytest.raises(EnqueueFailed) as caught:
                shop.ship.enqueue(Order(1))
        assert isinstance(caught.value.__cause__, psycopg.errors.QueryCanceled)
        connection.rollback()
        with using(connection):
            shop.ship.enqueue(Order(2))
    assert shop.jobs() == [2]


@pytest.mark.databases("postgres")
def test_an_interrupt_while_a_job_is_written(shop: Shop) -> None:
    """Ctrl-C ends the statement on the server, and the connection can be used on."""
    with psycopg.connect(shop.url) as connection, closing(psycopg.connect(shop.url)) as other:
        connection.execute("SELECT 1")
        other.execute("LOCK TABLE dbqueue_jobs")
        pid = connection.info.backend_pid

        def interrupt() -> None:
            waits = f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
            with closing(psycopg.connect(shop.url, autocommit=True)) as eye:
                wait_for(lambda: eye.execute(waits).fetchone(), 10, "it does not wait")
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with using(connection), pytest.raises(KeyboardInterrupt):
            shop.ship.enqueue(Order(1))
        thread.join()
        other.rollback()
        connection.rollback()
        with using(connection):
            shop.ship.enqueue(Order(2))
    assert shop.jobs() == [2]


@pytest.mark.databases("postgres")
def test_a_pipeline_of_the_callers(shop: Shop) -> None:
    with psycopg.connect(shop.url) as connection:
        with connection.pipeline():
            connection.execute("INSERT INTO orders VALUES (1)")
            cursor = connection.execute("SELECT 42")
            everything(shop, connection)
            with using(connection):
                shop.ship.enqueue(Order(6))
            assert cursor.fetchone() == (42,)
        connection.commit()
        with connection.pipeline(), using(connection):
            connection.execute("INSERT INTO orders VALUES (1)")
            with pytest.raises(EnqueueFailed) as caught:  # it learns of the caller's error first
                shop.ship.enqueue(Order(9))
            assert isinstance(caught.value.__cause__, psycopg.errors.UniqueViolation)
        connection.rollback()
    assert shop.both() == ([1], [1, 4, 6])


@pytest.mark.databases("postgres")
def test_a_job_is_the_first_that_is_written(shop: Shop) -> None:
    """The driver begins its transaction with our statement."""
    with psycopg.connect(shop.url) as connection:
        for end in (connection.rollback, connection.commit):
            with using(connection):
                shop.ship.enqueue(Order(1))
            assert shop.jobs() == []
            end()
    assert shop.jobs() == [1]


# -- psycopg2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("cursor", ["RealDictCursor", "DictCursor", "NamedTupleCursor"])
def test_cursor_classes_of_psycopg2(shop: Shop, cursor: str) -> None:
    with closing(psycopg2.connect(shop.url, cursor_factory=getattr(psycopg2.extras, cursor))) as connection:
        everything(shop, connection)
    with closing(psycopg2.connect(shop.url, connection_factory=psycopg2.extras.RealDictConnection)) as connection:
        everything(shop, connection)


# -- any PostgreSQL driver ---------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])
@pytest.mark.parametrize(
    "setting",
    [
        "search_path = nowhere",
        "search_path = ''",
        "bytea_output = escape",
        "standard_conforming_strings = off",
        "client_encoding = LATIN1",
        "DateStyle = 'SQL, DMY'",
        "TimeZone = 'Asia/Kathmandu'",
        "lc_messages = 'C'",
        "enable_seqscan = off",
        "plan_cache_mode = force_generic_plan",
        "TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "CONSTRAINTS ALL DEFERRED",
    ],
)
def test_settings_of_the_session(shop: Shop, connect: Callable[..., Any], setting: str) -> None:
    with closing(connect(shop.url)) as connection:
        connection.cursor().execute(f"SET {setting}")
        everything(shop, connection)
        connection.commit()
    assert shop.jobs() == [1, 4]


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_isolation_levels_of_sqlalchemy(shop: Shop, driver: str, level: str) -> None:
    engine = engine_of(shop, driver, isolation_level=level)
    with orm.Session(engine) as session:
        everything(shop, session)
        assert session.scalar(sqlalchemy.text("SHOW transaction_isolation")) == level.lower()
        session.commit()
    engine.dispose()
    assert shop.jobs() == [1, 4]


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("encoding", ["LATIN1", "UTF8"])
@pytest.mark.parametrize("key", [None, "schl\u00fcssel"])
def test_texts_in_the_callers_encoding(shop: Shop, encoding: str, key: str | None) -> None:
    with psycopg.connect(shop.url) as connection:
        connection.execute(f"SET client_encoding = {encoding}")
        with using(connection):
            shop.queue.send("gr\u00fcn", 1, key=key)
    assert shop.look("SELECT queue, key FROM dbqueue_jobs") == [("gr\u00fcn", key)]


@pytest.mark.databases("postgres")
def test_a_key_that_the_callers_encoding_does_not_have(shop: Shop) -> None:
    with psycopg.connect(shop.url) as connection:
        connection.execute("SET client_encoding = LATIN1")
        with using(connection), pytest.raises(EnqueueFailed) as caught:
            shop.ship.enqueue(Order(1), key="\u20ac")
        assert "\u20ac" not in str(caught.value)


# -- sqlite3 -----------------------------------------------------------------------------------------------------------

Fields = namedtuple("Fields", "value")


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("text", [bytes, bytearray, str, lambda raw: raw.decode(errors="replace")])
@pytest.mark.parametrize(
    "row", [None, sqlite3.Row, lambda cursor, row: dict(enumerate(row)), lambda cursor, row: Fields(row)]
)
def test_factories_of_sqlite3(shop: Shop, row: Any, text: Any) -> None:
    with closing(sqlite3.connect(shop.path)) as connection:
        connection.row_factory, connection.text_factory = row, text
        everything(shop, connection)
        assert (connection.row_factory, connection.text_factory) == (row, text)


@pytest.mark.databases("sqlite")
def test_a_connection_and_cursor_class_of_the_callers(shop: Shop) -> None:
    class Cursor(sqlite3.Cursor):
        def execute(self, *arguments: Any) -> Any:
            raise AssertionError("the caller's own cursor")

    class Connection(sqlite3.Connection):
        def cursor(self, *arguments: Any) -> Any:
            return super().cursor(Cursor)

    with closing(sqlite3.connect(shop.path, factory=Connection)) as connection:
        everything(shop, connection)
        connection.commit()
    assert shop.jobs() == [1, 4]


# -- cursors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds("psycopg", "psycopg2", "sqlite3"), ids=str)
def test_our_cursors_are_closed(shop: Shop, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    for module in (psycopg, psycopg2.extensions, sqlite3):
        name = "cursor" if module is psycopg2.extensions else "Cursor"
        monkeypatch.setattr(module, name, recording(getattr(module, name), opened))
    with using(caller.given):
        shop.ship.enqueue(Order(1), key="a")
        shop.ship.enqueue(Order(2), key="a")
        shop.queue.jobs()
    assert len(opened) >= 4
    assert all(closed(cursor) for cursor in opened)


def recording(cursor: Any, opened: list[Any]) -> Any:
    class Recording(cursor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(self)

    return Recording


def closed(cursor: Any) -> bool:
    if not isinstance(cursor, sqlite3.Cursor):
        return bool(cursor.closed)
    try:
        cursor.fetchone()
    except sqlite3.ProgrammingError:
        return True
    return False


@pytest.mark.databases("sqlite")
def test_a_cursor_of_sqlite3_that_is_read_by_half(shop: Shop) -> None:
    shop.look("INSERT INTO orders SELECT value FROM generate_series(1, 5)" if shop.postgres else five_orders())
    with closing(sqlite3.connect(shop.path)) as connection:
        cursor = connection.execute("SELECT number FROM orders ORDER BY number")
        assert [cursor.fetchone(), cursor.fetchone()] == [(1,), (2,)]
        everything(shop, connection)
        assert cursor.fetchall() == [(3,), (4,), (5,)]
        connection.commit()
    assert shop.jobs() == [1, 4]


def five_orders() -> str:
    return "INSERT INTO orders VALUES (1), (2), (3), (4), (5)"


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])
def test_a_server_side_cursor_that_is_read_by_half(shop: Shop, connect: Callable[..., Any]) -> None:
    shop.look(five_orders())
    with closing(connect(shop.url)) as connection:
        cursor = connection.cursor("mine")
        cursor.execute("SELECT number FROM orders ORDER BY number")
        plain = connection.cursor()
        plain.execute("SELECT number FROM orders ORDER BY number")
        assert [cursor.fetchone(), cursor.fetchone(), plain.fetchone()] == [(1,), (2,), (1,)]
        everything(shop, connection)
        assert cursor.fetchall() == [(3,), (4,), (5,)]
        assert plain.fetchall() == [(2,), (3,), (4,), (5,)]
        cursor.close()
        connection.commit()
    assert shop.jobs() == [1, 4]


@pytest.mark.databases("postgres")
def test_a_stream_that_is_read_by_half(shop: Shop) -> None:
    """The connection is busy, and psycopg would wait for this very thread to read on. So it fails, and the stream goes on."""
    shop.look(five_orders())
    failed: list[BaseException] = []
    connection = psycopg.connect(shop.url)

    def work() -> None:
        stream = connection.cursor().stream("SELECT number FROM orders ORDER BY number")
        assert next(stream) == (1,)
        with using(connection):
            try:
                shop.ship.enqueue(Order(1))
            except EnqueueFailed as error:
                failed.append(error)
            assert list(stream) == [(2,), (3,), (4,), (5,)]
            shop.ship.enqueue(Order(2))

    thread = threading.Thread(target=work, daemon=True)  # one that hangs could not be ended
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert "busy" in str(failed[0])
    connection.commit()
    connection.close()
    assert shop.jobs() == [2]


def test_sqlalchemy_results_that_are_read_by_half(shop: Shop) -> None:
    shop.look(five_orders())
    engine = engine_of(shop)
    with orm.Session(engine) as session:
        result = session.execute(
            sqlalchemy.text("SELECT number FROM orders ORDER BY number").execution_options(stream_results=True)
        )
        assert result.fetchone() == (1,)
        everything(shop, session)
        assert [number for (number,) in result] == [2, 3, 4, 5]
        session.commit()
    engine.dispose()
    assert shop.jobs() == [1, 4]
