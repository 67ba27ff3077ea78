"""Results of real workers, and who waits for them where (C9)."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from celery import chord, group
from celery.result import AsyncResult

from dbqueue import DBQueue
from tests.bouncer import bounced
from tests.servers import Server
from tests.transport.shops import ROOT, Shop, need_package
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C9"), pytest.mark.timeout(180)]

MakeShop = Callable[..., Shop]

MORE = """
from celery.result import allow_join_result

app.conf.update(task_track_started=True, result_extended=True)

class OutOfStock(Exception):
    pass

@app.task(shared=False)
def order(name):
    raise OutOfStock(name)

@app.task(shared=False)
def silent(x):
    note(f"silent {x}")
    return x

@app.task(shared=False, bind=True)
def steps(self, n):
    for step in range(n):
        self.update_state(state="PROGRESS", meta={"step": step})
    return n

@app.task(shared=False)
def asks(x):
    with allow_join_result():
        return add.delay(x, 1).get(timeout=60)
"""


@pytest.mark.databases("sqlite", "postgres", "postgres15")
def test_a_worker_stores_and_a_client_waits(make_shop: MakeShop, broker_url: str, queue: DBQueue) -> None:
    """The children of a prefork pool store, and one of them waits for another's result."""
    shop = make_shop(backend=broker_url, more=MORE)
    worker = shop.worker(size=2)
    tasks = shop.app
    assert tasks.add.delay(1, 2).get(timeout=60) == 3
    with pytest.raises(tasks.OutOfStock, match="apples"):
        tasks.order.delay("apples").get(timeout=60)
    assert group(tasks.add.s(n, n) for n in range(30))().get(timeout=60) == [2 * n for n in range(30)]
    assert tasks.asks.delay(4).get(timeout=60) == 5
    assert tasks.steps.delay(3).get(timeout=60) == 3
    chained = (tasks.add.s(1, 1) | tasks.add.s(5)).delay()
    assert chained.get(timeout=60) == 7
    page = (ROOT / "docs" / "celery.md").read_text(encoding="utf-8")
    example = re.search(r"^## Results\n.*?```python\n(result = .*?)```", page, re.DOTALL | re.MULTILINE)
    assert example is not None
    names: dict[str, Any] = {"add": tasks.add, "total": tasks.total, "group": group, "chord": chord}
    exec(example[1], names)
    assert names["result"].get(timeout=10) == 5
    extended = AsyncResult(chained.id, app=tasks.app)
    assert (extended.name, list(extended.args)) == ("shop.add", [2, 5])
    ignored = tasks.silent.apply_async((1,), ignore_result=True)
    shop.wait_for_note("silent 1")
    again = tasks.add.delay(2, 2)
    assert again.get(timeout=60) == 4
    assert AsyncResult(ignored.id, app=tasks.app).state == "PENDING"
    banner = shop.log(worker)
    assert f"results:     {tasks.app.backend.as_uri()}" in banner, banner
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait(60) == 0
    assert "Retrying" not in shop.log(worker), "a child had to store something twice"


@pytest.mark.databases("postgres")
def test_what_results_cost_the_server(make_shop: MakeShop, broker_url: str, queue: DBQueue, postgres: Server) -> None:
    """The worker holds its three; a child has one while it stores; a client one that reads and one that listens."""
    name = queue.database.url.database

    def sessions(application: str) -> int:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = %s"
        return int(postgres.execute(asked, (name, application))[0][0])

    url = f"{broker_url}?application_name=worker"
    shop = make_shop(backend=url, broker_url=url)
    shop.worker(size=2)
    text = (shop.folder / "shop.py").read_text().replace("=worker", "=client")
    (shop.folder / "shop.py").write_text(text)
    tasks = shop.app
    for n in range(10):
        assert tasks.add.delay(n, 1).get(timeout=60) == n + 1
    assert sessions("worker") <= 3 + 2
    assert sessions("client") <= 3  # the third has published
    assert group(tasks.add.s(n, n) for n in range(20))().get(timeout=60) == [2 * n for n in range(20)]
    assert sessions("worker") <= 3 + 2


@pytest.mark.databases("postgres", "postgres15")
def test_through_a_pooler_in_transaction_mode(
    make_shop: MakeShop, queue: DBQueue, database_url: str, database: str
) -> None:
    """The client waits on a connection beside the pooler, or reads now and then."""
    with bounced(database_url, "transaction", "default_pool_size = 3") as inner:
        heard = f"listen_url={quote(database_url, safe='')}" if database == "postgres" else "notify=false"
        url = f"dbqueue+{inner}?pgbouncer=true&{heard}"
        shop = make_shop(backend=url, broker_url=url, more=MORE)
        worker = shop.worker(size=2)
        tasks = shop.app
        assert tasks.add.delay(1, 2).get(timeout=60) == 3
        assert group(tasks.add.s(n, n) for n in range(20))().get(timeout=60) == [2 * n for n in range(20)]
        parts = [tasks.add.s(n, n) for n in range(20)]
        assert chord(parts, tasks.total.s()).delay().get(timeout=60) == 380
        failing = chord([tasks.add.s(1, 1), tasks.order.s("pears")], tasks.total.s()).delay()
        with pytest.raises(Exception, match="pears"):
            failing.get(timeout=60)
        assert tasks.asks.delay(4).get(timeout=60) == 5
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(60) == 0
        log = shop.log(worker)
        assert "Retrying" not in log, log
        with psycopg.connect(inner, prepare_threshold=None) as connection:
            assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
            assert connection.execute("SELECT count(*) FROM pg_listening_channels()").fetchone() == (0,)


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys, threading
import gevent
from shop import app, add
from celery.result import AsyncResult

heard = []

def ask(n):
    result = add.delay(n, 1)
    result.then(lambda result: heard.append(n))
    return result.get(timeout=60)

found = [greenlet.get() for greenlet in [gevent.spawn(ask, n) for n in range(30)]]
assert found == [n + 1 for n in range(30)], found
assert sorted(heard) == list(range(30)), heard
result = add.delay(1, 1)
done = gevent.event.Event()
result.then(lambda result: done.set())
assert done.wait(60), "a callback needs nobody who waits"
print("done", flush=True)
"""


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("pool", ["gevent", pytest.param("threads", marks=pytest.mark.soak)])
def test_greenlets_wait(make_shop: MakeShop, broker_url: str, queue: DBQueue, pool: str) -> None:
    """In the client, each with a drainer of its own, and in a worker's pool."""
    need_package("gevent")
    shop = make_shop(backend=broker_url, more=MORE)
    worker = shop.worker(pool=pool, size=20)
    client = shop.python("-W", "ignore", "-c", GREENLETS)
    assert "done" in shop.ended(client, 90)
    tasks = shop.app
    assert group(tasks.asks.s(n) for n in range(8))().get(timeout=60) == [n + 1 for n in range(8)]
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait(60) == 0


@pytest.mark.soak
@pytest.mark.databases("postgres")
def test_results_come_through_a_restart_of_the_database(
    make_shop: MakeShop, broker_url: str, queue: DBQueue, postgres: Server
) -> None:
    """The worker's stores and the client's waiting both bridge it."""
    shop = make_shop(backend=broker_url)
    shop.worker(size=2)
    tasks = shop.app
    results: list[Any] = [tasks.add.delay(n, 1) for n in range(40)]
    wait_for(lambda: len(shop.notes) >= 5, 60)
    postgres.restart("immediate")
    later = [tasks.add.delay(n, 1) for n in range(40, 45)]
    assert [result.get(timeout=120) for result in later] == [n + 1 for n in range(40, 45)]
    stored = [result for result in results if result.ready()]
    # Early acks: what a worker had in its hands at that moment may be stored late, but what was noted is stored.
    assert len(stored) >= len(shop.notes) - 5 - 2
