"""What the tests of the Kombu transport share: a broker URL on a fresh database, and real Celery workers in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
from celery import Celery

from dbqueue import DBQueue
from tests.transport.shops import Shop


@pytest.fixture
def broker_url(database_url: str) -> str:
    return f"dbqueue+{database_url}"


@pytest.fixture
def queue(database_url: str) -> Iterator[DBQueue]:
    """dbqueue's own view of the broker's database."""
    queue = DBQueue(database_url)
    queue.migrate()
    yield queue
    queue.close()


@pytest.fixture
def connect(broker_url: str) -> Iterator[Callable[..., kombu.Connection]]:
    """Opens kombu connections, with the given transport options; closed at the end."""
    opened: list[kombu.Connection] = []

    def make(**options: Any) -> kombu.Connection:
        connection = kombu.Connection(broker_url, transport_options=options)
        connection.connect()
        opened.append(connection)
        return connection

    yield make
    for connection in opened:
        connection.release()


@pytest.fixture
def app(broker_url: str, queue: DBQueue) -> Iterator[Celery]:
    """A Celery app without tasks, whose queue is ``q``."""
    app = Celery("shop", broker=broker_url, set_as_current=False)
    app.conf.task_default_queue = "q"
    yield app
    app.close()


@pytest.fixture
def make_shop(broker_url: str, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    """A function that makes the shop, with the given transport options."""
    made: list[Shop] = []

    def make(backend: str = "", broker_url: str = broker_url, more: str = "", **options: Any) -> Shop:
        folder = tmp_path / "shop"
        folder.mkdir()
        made.append(Shop(folder, broker_url, options, backend, more))
        return made[-1]

    yield make
    for shop in made:
        shop.close()
        module = sys.modules.pop("shop", None)
        if module is not None:
            module.app.close()
        if str(shop.folder) in sys.path:
            sys.path.remove(str(shop.folder))
