"""No door of the broker leads to the queues that dbqueue keeps for itself, an outbox's for one (A6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import kombu
import psycopg
import pytest
from celery import Celery

import dbqueue
from dbqueue import DBQueue, ReservedName

pytestmark = pytest.mark.req("A6")

NAME = "dbqueue.outbox.receipts"


@pytest.fixture
def untouched(queue: DBQueue) -> Iterator[DBQueue]:
    """One message waits in the outbox, before the test and after it."""
    queue.outbox("receipts").enqueue(1)
    yield queue
    assert queue.counts() == {"pending": 1}
    got: list[Any] = []
    assert queue.outbox("receipts").run_once("w", lambda message: got.append((message.payload, message.attempt)))
    assert got == [(1, 1)]


DOORS: dict[str, Callable[[Any], object]] = {
    "declare": lambda channel: channel.queue_declare(NAME),
    "declare passively": lambda channel: channel.queue_declare(NAME, passive=True),
    "bind": lambda channel: channel.queue_bind(NAME, "amq.direct", NAME),
    "consume": lambda channel: channel.basic_consume(NAME, True, print, "tag"),
    "get": lambda channel: channel.basic_get(NAME),
    "purge": lambda channel: channel.queue_purge(NAME),
    "delete": lambda channel: channel.queue_delete(NAME),
    "publish": lambda channel: channel.basic_publish(channel.prepare_message("x"), "", NAME),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_door_of_a_channel(untouched: DBQueue, connect: Callable[..., kombu.Connection], door: str) -> None:
    with pytest.raises(ReservedName, match="which dbqueue keeps for itself"):
        DOORS[door](connect().default_channel)


@pytest.mark.parametrize("way", ["queue", "default exchange", "exchange"])
def test_a_celery_producer(untouched: DBQueue, app: Celery, way: str) -> None:
    """Also when it names a queue of its own whose messages would go there."""
    target: dict[str, Any] = {
        "queue": {"queue": NAME},
        "default exchange": {"queue": kombu.Queue(NAME, kombu.Exchange(""), NAME)},
        "exchange": {"queue": kombu.Queue(NAME, kombu.Exchange("x"), "k")},
    }[way]
    with pytest.raises(ReservedName):
        app.send_task("shop.add", (1, 2), **target)


@pytest.mark.databases("postgres")
def test_a_celery_producer_that_joins(untouched: DBQueue, app: Celery, database_url: str) -> None:
    with closing(psycopg.connect(database_url)) as connection:
        connection.execute("SELECT 1")
        with dbqueue.using(connection), pytest.raises(ReservedName):
            app.send_task("shop.add", (1, 2), queue=NAME)
        assert connection.execute("SELECT 1").fetchone() == (1,), "its transaction is none the worse"
        connection.commit()
