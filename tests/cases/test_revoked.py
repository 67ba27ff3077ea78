"""Failures of Celery's remote control that others met, on this broker: revokes that are lost, that harm, that pile up."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dbqueue import DBQueue
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import make_shop as make_shop
from tests.transport.conftest import queue as queue
from tests.transport.shops import Shop
from tests.waiting import wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.req("C10")]

MakeShop = Callable[..., Shop]


def test_a_revoke_while_no_worker_is_up_is_not_lost(make_shop: MakeShop, queue: DBQueue) -> None:
    """C84. Celery: it is lost, and the task runs later."""
    shop = make_shop()
    revoked, kept = shop.app.add.delay(1, 1), shop.app.add.delay(2, 2)
    shop.app.app.control.revoke(revoked.id)
    states = {record.task_id: record.state for record in queue.jobs() if record.task_id}
    assert states == {revoked.id: "cancelled", kept.id: "pending"}
    shop.worker(pool="solo", size=1)
    wait_for(lambda: queue.counts("shop") == {"acked": 2, "cancelled": 1}, 30)  # the notice, and the one that ran
    assert shop.notes == ["add 2 2"]


def test_revoking_what_has_ended_harms_nobody(make_shop: MakeShop, queue: DBQueue, tmp_path: Path) -> None:
    """C86. Celery: with terminate=True the worker stopped consuming. Neither record nor result of an ended task changes."""
    shop = make_shop(backend=f"db+sqlite:///{tmp_path}/results.db")
    add, control = shop.app.add, shop.app.app.control
    done = [add.delay(n, 0) for n in range(10)]
    shop.worker(size=2)
    wait_for(lambda: queue.counts("shop") == {"acked": 10}, 30)
    wait_for(lambda: all(result.state == "SUCCESS" for result in done), 30)
    for result in done:
        control.revoke(result.id, terminate=True)
    assert control.ping(timeout=10, destination=["w0@shop"])  # it has heard them all
    more = [add.delay(n, 1) for n in range(10)]
    wait_for(lambda: queue.counts("shop") == {"acked": 20}, 30)
    wait_for(lambda: all(result.state == "SUCCESS" for result in more), 30)  # acknowledged before they ran
    assert Counter(shop.notes) == Counter(f"add {n} {m}" for n in range(10) for m in range(2))
    assert {result.state for result in done} == {"SUCCESS"}


@pytest.mark.soak
def test_workers_that_start_do_not_pile_up_revoked_ids(make_shop: MakeShop, queue: DBQueue, database_url: str) -> None:
    """C12. Celery: each start makes all others send their complete set; replies of megabytes stay in the broker."""
    shop = make_shop()
    control = shop.app.app.control
    shop.worker(pool="solo", size=1)
    shop.worker(pool="solo", size=1)
    before = size(queue, database_url)
    for _ in range(10):
        control.revoke([uuid4().hex for _ in range(500)])
    known = wait_for(lambda: control.inspect(timeout=10, limit=2).revoked(), 30)
    assert [len(task_ids) for task_ids in known.values()] == [5_000, 5_000]
    for _ in range(5):
        worker = shop.worker(pool="solo", size=1)
        assert "mingle: sync with 2 nodes" in shop.logs[-1].read_text()
        worker.terminate()
        assert worker.wait(60) == 0
    assert queue.counts() == {}, "the message table holds none of it"
    assert size(queue, database_url) - before < 5_000_000
    dialect = queue.database.dialect
    mail = dialect.mail_session()
    count = dialect.portable("SELECT count(*), max(length(payload)) FROM {mail}")
    letters, longest = mail.execute(count)[0] if mail else queue.database.read(lambda s: s.execute(count))[0]
    if mail:
        mail.close()
    assert letters < 200
    assert longest < 500_000
    for log in shop.logs:
        assert "ERROR" not in log.read_text()


def size(queue: DBQueue, database_url: str) -> int:
    if database_url.startswith("sqlite"):
        path = database_url.removeprefix("sqlite:///")
        return sum(os.path.getsize(name) for name in (path, f"{path}-mail") if os.path.exists(name))
    rows: Any = queue.database.read(lambda s: s.execute("SELECT pg_database_size(current_database())"))
    return int(rows[0][0])
