"""A role whose defaults are serializable and read only changes nothing: our own transactions say what they need."""

from __future__ import annotations

import threading

import pytest

from dbqueue import DBQueue
from dbqueue.runtime.worker import Worker, WorkerOptions
from tests.servers import Server


@pytest.mark.req("D11", "D13")
@pytest.mark.parametrize("default", ["transaction_isolation = 'serializable'", "transaction_read_only = on"])
def test_enqueue_and_work_under_other_defaults(postgres: Server, database_url: str, default: str) -> None:
    first = DBQueue(database_url)
    first.migrate()
    first.close()
    name = database_url.rpartition("/")[2].partition("?")[0]
    postgres.execute(f'ALTER DATABASE "{name}" SET default_{default}')
    queue = DBQueue(database_url, workers=4)

    @queue.job(max_attempts=1, timeout=10, name="noop")
    def noop() -> None: ...

    threads = [threading.Thread(target=lambda: [noop.enqueue(key=f"k{n % 7}") for n in range(30)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(40):
        noop.enqueue()
    assert Worker(queue, WorkerOptions(once=True, slots=4)).run() == 0
    counts = queue.counts()
    assert set(counts) == {"succeeded"}
    assert counts["succeeded"] >= 47
    queue.close()
