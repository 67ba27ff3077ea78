"""Real Celery workers that are given what killed others: messages that nobody can read, tasks that do not end, greenlets by the dozen."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import celery
import pytest

from dbqueue import DBQueue
from dbqueue.database.tables import Names
from tests.doors.conftest import Run
from tests.doors.conftest import cli as cli
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import connect as connect
from tests.transport.conftest import make_shop as make_shop
from tests.transport.conftest import queue as queue
from tests.transport.shops import Shop
from tests.transport.test_messages import Connect, declared
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

MakeShop = Callable[..., Shop]

_MORE = """

from celery.exceptions import Reject

app.conf.broker_pool_limit = 150  # with fewer than greenlets that publish, kombu has none left for an answer to remote control

@app.task(bind=True, acks_late=True)
def put_back(self):
    again = self.request.delivery_info["redelivered"]
    note(f"put_back {again}")
    if not again:
        raise Reject("once more", requeue=True)

@app.task(bind=True, acks_late=True, acks_on_failure_or_timeout=False, time_limit=1)
def endless(self):
    again = self.request.delivery_info["redelivered"]
    note(f"endless {again}")
    if not again:
        time.sleep(600)

@app.task
def nap(name, children):
    note(f"start {name}")
    for n in range(children):
        add.delay(name, n)
    time.sleep(1)
    note(f"end {name}")
"""


def with_more_tasks(shop: Shop) -> Shop:
    file = shop.folder / "shop.py"
    file.write_text(file.read_text() + _MORE)
    return shop


class Boom:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def unreadable(task: str, boom: Path) -> list[tuple[bytes, str, str, dict[str, str]]]:
    """Bodies, their kinds, encodings and headers. The one whose id is ``damaged`` can be read until its row is spoilt."""
    of_task = {"task": task, "lang": "py"}
    pickled = pickle.dumps([[Boom(boom), 1], {}, {}])
    return [
        (b"\x80\x81", "application/json", "utf-8", {**of_task, "id": "undecodable"}),
        (b"not json", "application/json", "utf-8", {**of_task, "id": "no json"}),
        (b"[]", "application/json", "utf-8", {**of_task, "id": "no arguments"}),
        (b"{}", "application/json", "utf-8", {}),
        (b"\xff", "application/what", "klingon", {**of_task, "id": "of no kind"}),
        (pickled, "application/x-python-serialize", "binary", {**of_task, "id": "pickled"}),
        (pickled, "application/x-python-serialize", "binary", {}),
        (b"[[1, 1], {}, {}]", "application/json", "utf-8", {**of_task, "id": "damaged"}),
    ]


def publish(channel: Any, queue: str, messages: list[tuple[bytes, str, str, dict[str, str]]]) -> None:
    for body, kind, encoding, headers in messages:
        channel.basic_publish(channel.prepare_message(body, 0, kind, encoding, headers), "", queue)


def damage(queue: DBQueue) -> None:
    jobs = Names("dbqueue_").qualified("jobs")
    queue.database.run(lambda s: s.execute(f"UPDATE {jobs} SET head = payload WHERE task_id = 'damaged'"))


@pytest.mark.req("C1", "C4")
def test_messages_that_cannot_be_read_harm_nobody(
    make_shop: MakeShop, connect: Connect, queue: DBQueue, cli: Run, tmp_path: Path, database_url: str
) -> None:
    """C127. Celery, Kombu: one message that cannot be decoded killed the worker, was put back, and killed the next. C140. Celery: whoever
    could write a message could have it unpickled. What Celery refuses it acks or rejects after one try; a row that is damaged below it
    never gets there and is dead; and those beside it are worked on."""
    shop, boom = make_shop(), tmp_path / "boom"
    channel = connect().default_channel
    declared(channel, "shop")
    shop.app.add.delay(0, 0)
    publish(channel, "shop", unreadable("shop.add", boom))
    damage(queue)
    shop.app.add.delay(2, 2)
    worker = shop.worker(size=1)
    wait_for(lambda: not {"running", "pending"} & set(queue.counts("shop")), 30, "something still waits")
    assert shop.notes == ["add 0 0", "add 2 2"]
    assert worker.poll() is None
    assert not boom.exists()
    assert {record.attempt for state in ("acked", "dead") for record in queue.jobs(queue="shop", state=state)} == {1}
    dead = [record for record in queue.jobs(queue="shop", state="dead") if record.task_id == "damaged"]
    assert [record.error_kind for record in dead] == ["rejected"]
    bad = next(
        r for state in ("acked", "dead") for r in queue.jobs(queue="shop", state=state) if r.task_id == "pickled"
    )
    assert cli("jobs", "show", bad.id, "--payload", "--url", database_url).code == 0
    assert not boom.exists()


@pytest.mark.soak
@pytest.mark.skipif(celery.VERSION < (5, 5), reason="before 5.5 Celery acknowledged what its time limit ended")
@pytest.mark.req("C1", "C4")
def test_a_task_knows_that_it_comes_again(make_shop: MakeShop, queue: DBQueue) -> None:
    """C133. Kombu: the flag was missing, and tasks that branch on it went round and round. C138. Celery: a hard time limit acknowledged the
    message although that was switched off."""
    shop = with_more_tasks(make_shop(lease=600))
    shop.worker(size=1)
    shop.app.put_back.delay()
    shop.app.endless.delay()
    wait_for(lambda: queue.counts("shop") == {"acked": 2}, 60, "not both came to an end")
    assert Counter(shop.notes) == {"put_back False": 1, "put_back True": 1, "endless False": 1, "endless True": 1}
    assert {record.attempt for record in queue.jobs(queue="shop", state="acked")} == {2}


@pytest.mark.soak
@pytest.mark.req("C1")
def test_a_hundred_greenlets_share_a_worker(make_shop: MakeShop, queue: DBQueue) -> None:
    """C96. Celery with gevent: "second simultaneous read", when several greenlets published or acknowledged on one connection. They do
    both here, and meanwhile the worker answers."""
    pytest.importorskip("gevent")
    shop = with_more_tasks(make_shop())
    shop.worker("--prefetch-multiplier", "1", pool="gevent", size=100)
    for n in range(50):
        shop.app.nap.delay(n, 20)
    wait_for(lambda: any(note.startswith("start") for note in shop.notes), 30)
    wait_for(lambda: shop.app.app.control.ping(timeout=5, limit=1), 60, "the worker does not answer")
    wait_for(lambda: queue.counts("shop") == {"acked": 1_050}, 120, "not all were done")
    expected = Counter(f"add {n} {child}" for n in range(50) for child in range(20))
    assert Counter(note for note in shop.notes if note.startswith("add")) == expected
    assert not [line for line in shop.logs[0].read_text().splitlines() if "ERROR" in line or "simultaneous" in line]
