"""examples/four_ways: one set of tasks and call sites on Redis or RabbitMQ, on our transport, in our worker, and without Celery. Each way
writes the same rows; three of them give the same result."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from tests.examples.commands import Commands
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C1", "C6", "C8"), pytest.mark.timeout(240)]

APP = "-A examples.four_ways.app"
CELERY_WORKER = f"celery {APP} worker -c 2 -l INFO -Q orders,labels"
OUR_WORKER = f"dbqueue worker {APP} -c 2 -Q orders,labels"

EVENTS = {
    "reserved", "reserved as a gift", "charge, after 0 retries", "charge, after 1 retries", "charge, after 2 retries", "charged",
    "the mail server is down", "receipt", "asked for a review", "label on A4", "label on A5", "label on A6", "lost",
}  # fmt: skip

Make = Callable[..., Commands]


def rows(commands: Commands) -> set[tuple[int, str]]:
    with closing(sqlite3.connect(commands.environment["SHOP_FILE"], timeout=30)) as shop:
        known = shop.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchall()
        return set(shop.execute("SELECT number, what FROM events").fetchall()) if known else set()


def run(make: Make, way: str, url: str, worker: str, results: str = "") -> str:
    """Orders are placed, and after that a worker starts. Returns what the report prints."""
    commands = make(SHOP_WAY=way, SHOP_URL=url, SHOP_RESULTS=results or url)
    commands.environment["SHOP_FILE"] = str(commands.folder / "shop.db")
    commands.run("python -m examples.four_ways.shop 1 2")
    assert rows(commands) == set()
    process = commands.serve(worker)
    wanted = {(number, what) for number in (1, 2) for what in EVENTS}
    wait_for(lambda: rows(commands) >= wanted, 60, "not everything happened")
    with_results = way == "celery"
    said = commands.run("python -m examples.four_ways.report 1 2 3", code=0 if with_results else 1)
    commands.kill(process)
    assert rows(commands) == wanted
    return said.splitlines()[-1]


@pytest.mark.soak
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_celery_on_another_broker(make_commands: Make, request: pytest.FixtureRequest, broker: str) -> None:
    url = request.getfixturevalue(f"{broker}_url")
    results = request.getfixturevalue("redis_url")
    assert run(make_commands, "celery", url, CELERY_WORKER, results) == "600"


@pytest.mark.soak
def test_celery_worker_on_our_transport(make_commands: Make, database_url: str) -> None:
    assert run(make_commands, "celery", f"dbqueue+{database_url}", CELERY_WORKER) == "600"


@pytest.mark.soak
def test_our_worker_with_celery(make_commands: Make, database_url: str) -> None:
    assert run(make_commands, "celery", f"dbqueue+{database_url}", OUR_WORKER) == "600"


def test_our_worker_without_celery(make_commands: Make, database_url: str) -> None:
    said = run(make_commands, "bridge", database_url, OUR_WORKER)
    assert said.startswith("dbqueue.errors.NotSupported: chord: canvas cannot be kept durable here")
