"""``with dbqueue.using(session): task.delay(...)``: the message commits with the caller's rows, or not at all (C5)."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import kombu
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import dbqueue
from dbqueue import DBQueue
from dbqueue.errors import (
    DifferentDatabase,
    EnqueueFailed,
    NotInTransaction,
    TransactionClosed,
    Unroutable,
    WouldDeadlock,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.req("C5")


@pytest.fixture
def app(broker_url: str, queue: DBQueue) -> Iterator[Any]:
    from celery import Celery

    app = Celery("shop", broker=broker_url, set_as_current=False)
    app.conf.task_default_queue = "shop"
    app.conf.task_publish_retry_policy = {"max_retries": 3, "interval_start": 0}

    @app.task(name="shop.receipt", shared=False)  # type: ignore[untyped-decorator]
    def receipt(number: int) -> None: ...

    yield app
    app.close()


@pytest.fixture
def session(database_url: str) -> Iterator[Session]:
    url = database_url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (number integer PRIMARY KEY)"))
    with Session(engine) as session:
        yield session
    engine.dispose()


def order(session: Session, number: int) -> None:
    session.execute(text(f"INSERT INTO orders VALUES ({number})"))


def committed(session: Session) -> int:
    with session.get_bind().connect() as connection:  # type: ignore[union-attr]
        return int(connection.execute(text("SELECT count(*) FROM orders")).scalar_one())


def messages(queue: DBQueue) -> int:
    return queue.counts().get("pending", 0)


def test_the_message_commits_with_the_rows(app: Any, session: Session, queue: DBQueue) -> None:
    with dbqueue.using(session):
        order(session, 1)
        app.tasks["shop.receipt"].delay(1)
    assert (committed(session), messages(queue)) == (0, 0)
    session.commit()
    assert (committed(session), messages(queue)) == (1, 1)


def test_a_rollback_takes_the_message_and_the_declaration(app: Any, session: Session, queue: DBQueue) -> None:
    receipt = app.tasks["shop.receipt"]
    with dbqueue.using(session):
        order(session, 1)
        receipt.delay(1)
    session.rollback()
    assert (committed(session), messages(queue)) == (0, 0)
    with app.connection_for_read() as connection, connection.channel() as channel:
        assert not channel._has_queue("shop")
    # The rolled-back declaration is not in kombu's cache: the next message declares again, and is routed.
    receipt.apply_async((2,), exchange="shop", routing_key="shop")
    assert messages(queue) == 1


def test_savepoints_count(app: Any, session: Session, queue: DBQueue) -> None:
    receipt = app.tasks["shop.receipt"]
    with dbqueue.using(session):
        receipt.delay(1)
        nested = session.begin_nested()
        receipt.delay(2)
        nested.rollback()
        receipt.delay(3)
    session.commit()
    assert messages(queue) == 2


def test_groups_and_chains_join(app: Any, session: Session, queue: DBQueue) -> None:
    from celery import chain, group

    receipt = app.tasks["shop.receipt"]
    with dbqueue.using(session):
        order(session, 1)
        group(receipt.si(n) for n in range(3)).apply_async()
        chain(receipt.si(4), receipt.si(5)).apply_async()
    assert messages(queue) == 0
    session.commit()
    assert messages(queue) == 4  # of the chain only its first


def test_an_error_leaves_once_and_as_ours(app: Any, session: Session, queue: DBQueue, database: str) -> None:
    """kombu would try again on errors that it knows, on the caller's broken transaction."""
    calls = []
    receipt = app.tasks["shop.receipt"]
    receipt.delay(0)
    table = "dbqueue_jobs"
    with queue.database.session() as own:
        own.execute(f"ALTER TABLE {table} RENAME TO elsewhere")
    try:
        with dbqueue.using(session):
            order(session, 1)
            from dbqueue.kombu_transport.channel import Channel

            real = Channel.basic_publish

            def counted(self: Any, *args: Any, **kwargs: Any) -> None:
                calls.append(1)
                real(self, *args, **kwargs)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Channel, "basic_publish", counted)
                with pytest.raises(EnqueueFailed):
                    receipt.delay(1)
    finally:
        session.rollback()
        with queue.database.session() as own:
            own.execute(f"ALTER TABLE elsewhere RENAME TO {table}")
    assert calls == [1]
    assert committed(session) == 0


def test_a_block_of_another_database_is_refused(app: Any, make_database_url: Callable[[], str], queue: DBQueue) -> None:
    url = make_database_url()
    connection: Any = (
        sqlite3.connect(url.removeprefix("sqlite:///")) if url.startswith("sqlite") else psycopg.connect(url)
    )
    try:
        with dbqueue.using(connection), pytest.raises(DifferentDatabase):
            app.tasks["shop.receipt"].delay(1)
        connection.rollback()
    finally:
        connection.close()
    assert messages(queue) == 0


def test_an_autocommit_connection_is_refused(app: Any, database_url: str, queue: DBQueue) -> None:
    path = database_url.removeprefix("sqlite:///")
    connection: Any = (
        sqlite3.connect(path, isolation_level=None)
        if database_url.startswith("sqlite")
        else psycopg.connect(database_url, autocommit=True)
    )
    try:
        with dbqueue.using(connection), pytest.raises(NotInTransaction):
            app.tasks["shop.receipt"].delay(1)
    finally:
        connection.close()


def test_a_thread_that_inherited_an_ended_block_is_told(app: Any, session: Session, queue: DBQueue) -> None:
    import contextvars

    with dbqueue.using(session):
        inherited = contextvars.copy_context()
    caught: list[BaseException] = []

    def late() -> None:
        try:
            app.tasks["shop.receipt"].delay(1)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=inherited.run, args=(late,))
    thread.start()
    thread.join()
    assert isinstance(caught[0], TransactionClosed)
    assert messages(queue) == 0


def test_no_route_is_an_error_inside_the_block_only(
    connect: Callable[..., kombu.Connection], session: Session, queue: DBQueue
) -> None:
    channel = connect().channel()
    channel.exchange_declare("e", type="direct", durable=True)
    producer = kombu.Producer(channel)
    producer.publish(1, exchange="e", routing_key="nowhere")
    with dbqueue.using(session), pytest.raises(Unroutable, match="'e'"):
        producer.publish(1, exchange="e", routing_key="nowhere")


def test_declarations_and_routes_of_the_block_are_seen_in_it(
    connect: Callable[..., kombu.Connection], session: Session, queue: DBQueue
) -> None:
    channel = connect().channel()
    target = kombu.Queue("q", kombu.Exchange("e", type="topic"), routing_key="a.*")
    with dbqueue.using(session):
        order(session, 1)
        kombu.Producer(channel).publish(1, exchange="e", routing_key="a.b", declare=[target])
    session.commit()
    assert channel.basic_get("q").payload == 1


def test_short_lived_messages_never_join(
    connect: Callable[..., kombu.Connection], session: Session, queue: DBQueue
) -> None:
    connection = connect()
    channel = connection.default_channel
    brief = kombu.Queue("b", kombu.Exchange("e", type="fanout", durable=False), auto_delete=True, durable=False)(
        channel
    )
    brief.declare()
    got: list[Any] = []
    with kombu.Consumer(connection, [brief], on_message=got.append, no_ack=True):
        with dbqueue.using(session):
            order(session, 1)
            kombu.Producer(channel).publish(1, exchange="e", delivery_mode=1)
            connection.drain_events(timeout=10)
        session.rollback()
    assert len(got) == 1


def test_an_async_session_writes_the_message_with_its_commit(
    app: Any, session: Session, queue: DBQueue, database_url: str
) -> None:
    import asyncio

    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    url = database_url.replace("postgresql://", "postgresql+asyncpg://").replace("sqlite://", "sqlite+aiosqlite://")
    receipt = app.tasks["shop.receipt"]
    receipt.delay(0)  # declares

    async def scenario() -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as asynchronous:
            with dbqueue.using(asynchronous):
                await asynchronous.execute(text("INSERT INTO orders VALUES (1)"))
                receipt.delay(1)
                assert messages(queue) == 1
            await asynchronous.rollback()
            with dbqueue.using(asynchronous):
                receipt.delay(2)
            await asynchronous.commit()
        await engine.dispose()

    asyncio.run(scenario())
    wait_for(lambda: messages(queue) == 2, 5)


@pytest.mark.parametrize("exchange", ["", "named"])
def test_an_async_sessions_declarations_wait_for_its_commit(
    app: Any, session: Session, queue: DBQueue, database_url: str, exchange: str
) -> None:
    """On SQLite the session holds the one write lock, so a declaration on another connection would wait for it."""
    import asyncio

    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    url = database_url.replace("postgresql://", "postgresql+asyncpg://").replace("sqlite://", "sqlite+aiosqlite://")
    app.conf.task_queues = [kombu.Queue("shop", kombu.Exchange("shop", type="topic"), routing_key="shop.#")]
    app.conf.task_default_exchange = "shop"
    to = {"exchange": "shop", "routing_key": "shop.a"} if exchange else {}

    async def scenario(end: str, number: int) -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as asynchronous:
            with dbqueue.using(asynchronous):
                await asynchronous.execute(text(f"INSERT INTO orders VALUES ({number})"))
                app.tasks["shop.receipt"].apply_async((number,), **to)
            await getattr(asynchronous, end)()
        await engine.dispose()

    asyncio.run(scenario("rollback", 1))
    assert (committed(session), messages(queue)) == (0, 0)
    asyncio.run(scenario("commit", 2))
    assert (committed(session), messages(queue)) == (1, 1)


def test_a_transient_task_joins(app: Any, session: Session, queue: DBQueue) -> None:
    with dbqueue.using(session):
        order(session, 1)
        app.tasks["shop.receipt"].apply_async((1,), delivery_mode=1)
    session.rollback()
    assert messages(queue) == 0
    with dbqueue.using(session):
        app.tasks["shop.receipt"].apply_async((1,), delivery_mode=1)
    session.commit()
    assert messages(queue) == 1


def test_events_of_a_block_are_sent_at_once(app: Any, session: Session, queue: DBQueue) -> None:
    app.conf.task_send_sent_event = True
    seen: list[Any] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        with receiver.consumer_context() as (own, _, _):
            with dbqueue.using(session):
                order(session, 1)
                app.tasks["shop.receipt"].delay(1)
                own.drain_events(timeout=10)
            session.rollback()
    assert [event["type"] for event in seen] == ["task-sent"]
    assert messages(queue) == 0


@pytest.mark.databases("sqlite")
def test_what_does_not_join_fails_at_once_where_it_would_wait_for_this_thread(
    connect: Callable[..., kombu.Connection], session: Session, queue: DBQueue
) -> None:
    channel = connect().default_channel
    brief = kombu.Queue("b", kombu.Exchange(""), auto_delete=True, durable=False, exclusive=True)(channel)
    began = time.monotonic()
    with dbqueue.using(session):
        order(session, 1)
        with pytest.raises(WouldDeadlock):
            brief.consume("tag")
        with pytest.raises(WouldDeadlock):
            kombu.Exchange("e", type="fanout", durable=False)(channel).declare()
    session.rollback()
    assert time.monotonic() - began < 5
    brief.queue_declare()


def test_the_first_request_for_a_reply_may_be_made_in_a_block(
    app: Any, session: Session, queue: DBQueue, connect: Callable[..., kombu.Connection]
) -> None:
    """The queue of the reply is declared there. A block that is rolled back leaves nothing, and the next one works."""
    app.conf.result_backend = "rpc://"
    receipt = app.tasks["shop.receipt"]
    with dbqueue.using(session):
        order(session, 1)
        receipt.delay(1)
    session.rollback()
    with dbqueue.using(session):
        order(session, 2)
        result = receipt.delay(2)
    session.commit()
    request = connect().channel().basic_get("shop")
    reply = {"task_id": result.id, "status": "SUCCESS", "result": 3, "traceback": None, "children": []}
    with connect().Producer() as producer:
        producer.publish(reply, routing_key=request.properties["reply_to"], correlation_id=result.id, delivery_mode=1)
    assert result.get(timeout=20) == 3
    request.ack()
