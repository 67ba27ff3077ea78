"""A Celery app whose results are in the broker's database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from dbqueue import DBQueue
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import make_shop as make_shop
from tests.transport.conftest import queue as queue

MakeApp = Callable[..., Celery]


@pytest.fixture
def make_app(broker_url: str, queue: DBQueue) -> Iterator[MakeApp]:
    """A function that makes an app, with the given settings."""
    made: list[Celery] = []

    def make(url: str = broker_url, **settings: Any) -> Celery:
        app = Celery("shop", broker=broker_url, backend=url, set_as_current=False)
        app.conf.update(task_default_queue="q", **settings)
        made.append(app)
        return app

    yield make
    for app in made:
        place = app.backend.known_place if app._backend is not None else None
        if place is not None:
            if place.hub._turn.acquire(timeout=2):  # else a test failed, and what waits for it goes on
                place.hub._close_connection()
            place.database.close()
        app.close()


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app()
