"""An unchanged Celery app: real workers of every pool, killed and stopped, ETAs, remote control, events (C1, C3, C4)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dbqueue import DBQueue
from tests.transport.shops import Shop, need_package
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

MakeShop = Callable[..., Shop]


def ended(process: subprocess.Popen[bytes], shop: Shop, seconds: float = 60) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(shop.logs[shop.workers.index(process)].read_text()) from None


def kill(worker: subprocess.Popen[bytes]) -> None:
    """With its children."""
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


@pytest.mark.req("C1")
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_every_pool_executes_and_ends_cleanly(make_shop: MakeShop, queue: DBQueue, pool: str) -> None:
    if pool == "gevent":
        need_package("gevent")
    shop = make_shop()
    worker = shop.worker(pool=pool)
    for n in range(20):
        shop.app.add.delay(n, 1)
    wait_for(lambda: len(shop.notes) >= 20, 60, "not all tasks ran")
    wait_for(lambda: queue.counts("shop") == {"acked": 20}, 30, "not all were acked")
    worker.send_signal(signal.SIGTERM)
    assert ended(worker, shop) == 0
    assert Counter(shop.notes) == Counter(f"add {n} 1" for n in range(20))


@pytest.mark.req("C1")
def test_children_publish_and_retry(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    shop.worker("--max-tasks-per-child", "2")
    for name in range(4):
        shop.app.fan.delay(name)
    shop.app.flaky.delay("x")
    wait_for(lambda: "try x 1" in shop.notes, 60, "the retry did not come")
    wait_for(lambda: sum(note.startswith("add") for note in shop.notes) == 12, 60)
    assert Counter(shop.notes).most_common(1)[0][1] == 1


@pytest.mark.soak
@pytest.mark.req("C1")
@pytest.mark.parametrize("pool", ["gevent", "threads"])
def test_many_tasks_of_one_process_publish_at_once(make_shop: MakeShop, queue: DBQueue, pool: str) -> None:
    if pool == "gevent":
        need_package("gevent")
    shop = make_shop()
    worker = shop.worker(pool=pool, size=50)
    for name in range(60):
        shop.app.fan.delay(name)
    wait_for(lambda: queue.counts("shop") == {"acked": 240}, 90, "not all were acked")
    assert Counter(shop.notes) == Counter(f"add {name} {n}" for name in range(60) for n in range(3))
    worker.send_signal(signal.SIGTERM)
    assert "ERROR" not in shop.ended(worker)


@pytest.mark.req("C4")
def test_a_killed_workers_tasks_come_back(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop(lease=3)
    worker = shop.worker(size=1)
    shop.app.late.delay("a", 4)
    shop.app.add.delay(1, 1)
    shop.wait_for_note("start a")
    wait_for(lambda: queue.counts("shop") == {"running": 2}, 30, "it did not fetch the second")
    kill(worker)
    killed = time.monotonic()
    shop.worker(size=2)
    shop.wait_for_note("end a", 60)
    wait_for(lambda: queue.counts("shop") == {"acked": 2}, 30)
    assert time.monotonic() - killed < 50
    assert Counter(shop.notes) == {"start a": 2, "end a": 1, "add 1 1": 1}
    assert {record.lapses for record in queue.jobs(queue="shop", state="acked")} == {1}


HELD = """
@app.task(shared=False)
def held():
    while not os.path.exists("until"):
        time.sleep(0.01)
"""


@pytest.mark.soak
@pytest.mark.req("C4")
def test_an_early_ack_that_is_not_written_yet(make_shop: MakeShop, queue: DBQueue) -> None:
    """A worker that is killed in the first moments of a task, which a lock makes longer here, leaves it to the lease."""
    shop = make_shop(lease=1, more=HELD)
    worker = shop.worker(size=1)
    shop.app.held.delay()
    shop.app.slow.delay("a", 600)
    wait_for(lambda: queue.counts("shop") == {"running": 1, "acked": 1}, 30, "it did not fetch the second")
    with queue.database.transaction() as session:
        if queue.database.dialect.name == "postgresql":
            session.execute(f"SELECT 1 FROM {queue.database.dialect.names.qualified('jobs')} FOR UPDATE")
        (shop.folder / "until").touch()
        shop.wait_for_note("start a")
        kill(worker)
    shop.worker(size=1)
    wait_for(lambda: shop.notes.count("start a") == 2, 30, "it did not come back")


@pytest.mark.soak
@pytest.mark.req("C4")
def test_a_solo_worker_acks_when_its_task_has_ended(make_shop: MakeShop, queue: DBQueue) -> None:
    """Celery's loop has no turn before."""
    shop = make_shop(lease=1)
    worker = shop.worker(pool="solo")
    shop.app.slow.delay("a", 600)
    shop.wait_for_note("start a")
    kill(worker)
    shop.worker(pool="solo")
    wait_for(lambda: shop.notes.count("start a") == 2, 30, "it did not come back")


@pytest.mark.req("C4")
@pytest.mark.parametrize(
    "pool", ["prefork", pytest.param("solo", marks=pytest.mark.soak), pytest.param("threads", marks=pytest.mark.soak)]
)
def test_a_task_longer_than_the_lease_runs_once(make_shop: MakeShop, queue: DBQueue, pool: str) -> None:
    """While it runs, through SIGTERM, until its end, with another worker waiting for its like."""
    shop = make_shop(lease=1)
    worker = shop.worker(pool=pool, size=1)
    shop.app.late.delay("a", 6)
    shop.wait_for_note("start a")
    shop.worker(size=1)
    worker.send_signal(signal.SIGTERM)
    assert ended(worker, shop) == 0
    assert shop.notes == ["start a", "end a"]
    wait_for(lambda: queue.counts("shop") == {"acked": 1}, 10)
    assert queue.jobs(queue="shop")[0].lapses == 0


@pytest.mark.req("C3", "C4")
def test_a_stopped_worker_gives_back_what_it_has_not_begun(make_shop: MakeShop, queue: DBQueue) -> None:
    """At once, and ETA tasks too: the lease here is longer than the test."""
    shop = make_shop(lease=600, eta_lead=60)
    worker = shop.worker(size=1)
    shop.app.slow.delay("a", 3)
    shop.wait_for_note("start a")
    for n in range(3):
        shop.app.add.delay(n, 0)
        shop.app.add.apply_async((n, 9), countdown=8)
    wait_for(lambda: queue.counts("shop").get("running", 0) >= 3, 30, "it did not fetch them")
    worker.send_signal(signal.SIGTERM)
    assert ended(worker, shop) == 0
    assert "end a" in shop.notes
    assert queue.counts("shop").get("running", 0) == 0
    assert {record.attempt for record in queue.jobs(queue="shop", state="pending")} == {0}
    shop.worker(size=1)
    wait_for(lambda: sum(note.startswith("add") for note in shop.notes) == 6, 60)
    assert Counter(shop.notes).most_common(1)[0][1] == 1


@pytest.mark.req("C3")
def test_far_etas_wait_in_the_database_and_near_ones_are_shown(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop(eta_lead=20)
    shop.worker(size=1)
    far = shop.app.add.apply_async((1, 1), countdown=3_600)
    near = shop.app.add.apply_async((2, 2), countdown=8)
    inspect = shop.app.app.control.inspect(timeout=3)

    def scheduled() -> list[str]:
        answer = inspect.scheduled() or {}
        return [entry["request"]["id"] for entries in answer.values() for entry in entries]

    assert wait_for(scheduled, 30) == [near.id]
    shop.wait_for_note("add 2 2", 60)
    waiting = [record for record in queue.jobs(queue="shop") if record.state == "pending"]
    assert [record.task_id for record in waiting] == [far.id]


@pytest.mark.req("C1", "C3")
def test_remote_control_and_events(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    first = shop.worker("-E", size=1)
    second = shop.worker("-E", size=1)
    control = shop.app.app.control
    assert sorted(name for answer in control.ping(timeout=3) for name in answer) == ["w0@shop", "w1@shop"]
    assert "mingle: sync with 1 nodes" in shop.logs[1].read_text()
    seen: list[dict[str, Any]] = []
    with shop.app.app.connection_for_read() as connection:
        receiver = shop.app.app.events.Receiver(connection, handlers={"*": seen.append})
        with receiver.consumer_context() as (own, *_):
            shop.app.add.delay(1, 1)
            wanted = {"task-received", "task-started", "task-succeeded", "worker-heartbeat"}

            def kinds() -> bool:
                with contextlib.suppress(TimeoutError):
                    own.drain_events(timeout=0.5)
                return wanted <= {event["type"] for event in seen}

            wait_for(kinds, 30, "not all events came")
    control.add_consumer("more", destination=["w0@shop"], reply=True, timeout=3)
    shop.app.add.apply_async((7, 7), queue="more")
    shop.wait_for_note("add 7 7")
    control.shutdown()
    assert [ended(first, shop), ended(second, shop)] == [0, 0]
    assert queue.counts("celeryev") == {}


@pytest.mark.req("C4")
def test_a_worker_outlives_a_restart_of_the_database(postgres: Any, make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    worker = shop.worker(size=1)
    shop.app.late.delay("a", 5)
    shop.wait_for_note("start a")
    postgres.stop()
    postgres.start()
    shop.wait_for_note("end a", 60)
    shop.app.add.delay(1, 1)
    shop.wait_for_note("add 1 1", 60)
    assert worker.poll() is None
    assert Counter(shop.notes) == {"start a": 1, "end a": 1, "add 1 1": 1}


@pytest.mark.req("C11")
def test_rpc_results(make_shop: MakeShop, queue: DBQueue) -> None:
    """A reply is a short-lived message: no job is made of it, and its queue goes with its client."""
    shop = make_shop(backend="rpc://")
    shop.worker(size=2)
    results = [shop.app.add.delay(n, 1) for n in range(20)]
    assert [result.get(timeout=30) for result in results] == list(range(1, 21))
    wait_for(lambda: queue.counts() == {"acked": 20}, 10)
