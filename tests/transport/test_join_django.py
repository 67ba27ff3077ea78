"""The option ``join``: what is published inside of Django's ``atomic()`` joins it without ``using`` (C5)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery

from dbqueue import ConfigError, DBQueue
from dbqueue.kombu_transport import options
from tests.joined.callers import Back, django_wrapper
from tests.joined.shop import Shop

pytestmark = pytest.mark.req("C5")


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    shop = Shop(database_url)
    wrapper = django_wrapper(shop)
    yield shop
    wrapper.close()
    shop.queue.close()
    shop._eye.close()


@pytest.fixture
def make_app(shop: Shop) -> Iterator[Callable[..., Any]]:
    made: list[Celery] = []

    def make(**given: Any) -> Any:
        app = Celery("shop", broker=f"dbqueue+{shop.url}", set_as_current=False)
        app.conf.broker_transport_options = given
        app.conf.task_default_queue = "shop"

        @app.task(name="shop.receipt", shared=False)  # type: ignore[untyped-decorator]
        def receipt(number: int) -> None: ...

        made.append(app)
        return receipt

    yield make
    for app in made:
        app.close()


def waiting(queue: DBQueue) -> int:
    return queue.counts("shop").get("pending", 0)


def test_atomic_is_joined(shop: Shop, make_app: Callable[..., Any]) -> None:
    from django.db import connection, transaction

    receipt = make_app(join="django:default")
    with suppress(Back), transaction.atomic():
        connection.cursor().execute("INSERT INTO orders VALUES (1)")
        receipt.delay(1)  # the first: it declares its queue
        receipt.delay(2)
        raise Back
    assert (shop.orders(), waiting(shop.queue)) == ([], 0)
    with transaction.atomic():
        connection.cursor().execute("INSERT INTO orders VALUES (1)")
        receipt.delay(1)
        with suppress(Back), transaction.atomic():
            receipt.delay(2)
            raise Back
        assert waiting(shop.queue) == 0
    assert (shop.orders(), waiting(shop.queue)) == ([1], 1)


def test_outside_of_atomic_and_in_other_threads_it_is_sent_at_once(shop: Shop, make_app: Callable[..., Any]) -> None:
    from django.db import transaction

    receipt = make_app(join="django:default")
    receipt.delay(1)
    assert waiting(shop.queue) == 1
    with transaction.atomic():
        other = threading.Thread(target=receipt.delay, args=(2,))
        other.start()
        other.join()
        assert waiting(shop.queue) == 2


def test_without_the_option_nothing_joins(shop: Shop, make_app: Callable[..., Any]) -> None:
    from django.db import transaction

    receipt = make_app()
    with transaction.atomic():
        receipt.delay(1)
        assert waiting(shop.queue) == 1


def test_a_declaration_that_was_rolled_back_is_made_again(shop: Shop, make_app: Callable[..., Any]) -> None:
    from django.db import transaction

    receipt = make_app(join="django:default")
    with suppress(Back), transaction.atomic():
        receipt.apply_async((1,), exchange="shop", routing_key="shop")
        raise Back
    receipt.apply_async((2,), exchange="shop", routing_key="shop")
    assert waiting(shop.queue) == 1


@pytest.mark.parametrize("value", ["default", "django:", 1, True])
def test_a_wrong_value_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="join"):
        options.read("sqlite:///a.db", {"join": value})
