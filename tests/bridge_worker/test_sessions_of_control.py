"""How many sessions a worker of Celery tasks holds with remote control and events (C6)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import celery
import pytest

from dbqueue import DBQueue
from dbqueue.runtime import idle
from tests.bridge_worker.steered import NODE, start
from tests.servers import Server
from tests.transport.conftest import make_shop, queue
from tests.transport.shops import Shop
from tests.waiting import wait_for

__all__ = ["make_shop", "queue"]

pytestmark = [pytest.mark.databases("postgres"), pytest.mark.timeout(180), pytest.mark.req("C6")]


@pytest.fixture
def broker_url(database_url: str) -> str:
    return f"dbqueue+{database_url}?application_name=worker"


@pytest.mark.soak
def test_the_parent_holds_four(
    make_shop: Callable[..., Shop], queue: DBQueue, broker_url: str, postgres: Server
) -> None:
    """One that works and one that listens, for the jobs and for remote control; one that reads remote control, one that publishes."""
    shop = make_shop()
    ours = broker_url.replace("=worker", "=test")
    name = queue.database.url.database
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = 'worker'"

    def sessions() -> int:
        return int(postgres.execute(asked, (name,))[0][0])

    app = celery.Celery(broker=ours, set_as_current=False)
    app.conf.task_default_queue = "shop"
    try:
        process = start(shop, "-E")
        for n in range(20):
            app.send_task("shop.add", (n, 1), queue="shop")
        # The child has one more; and this process had some, with which it asked.
        wait_for(lambda: sessions() == 5, 4 * idle.LOOK_EVERY, "the parent has not four")
        assert app.control.ping(timeout=3, limit=1) == [{NODE: {"ok": "pong"}}]
        assert app.control.inspect([NODE], timeout=3).stats()[NODE]["total"] == {"shop.add": 20}
        assert sessions() <= 5
        os.kill(process.pid, signal.SIGTERM)
        shop.ended(process)
        wait_for(lambda: sessions() == 0, 10, "it left some")
    finally:
        app.close()
