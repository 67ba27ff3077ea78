"""Tables that only grow, maintenance that gets in the way of work, and numbers that run out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
import pytest

import dbqueue
from dbqueue import DBQueue, KeyTaken, QueueError, events
from tests.runtimes.lab import Told, drained, in_thread, wait_all
from tests.servers import Server
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]


@dataclass(frozen=True)
class Number:
    n: int


@pytest.mark.req("D7")
def test_finished_jobs_are_deleted_by_the_workers_themselves(make_queue: MakeQueue, told: Told) -> None:
    """C101. Celery with SQLAlchemy, AiiDA, Galaxy: the rows of finished messages are never deleted, and reach gigabytes. Dead jobs
    stay, as the documents say: somebody has to decide."""
    queue = make_queue(workers=16)

    @queue.job(max_attempts=1, timeout=20)
    def job(number: Number) -> None:
        if number.n < 0:
            raise ValueError

    job.enqueue_many([Number(n) for n in range(1_500)])
    job.enqueue(Number(-1))
    queue.cancel(job.enqueue(Number(0), delay=60).id)
    drained(queue)
    queue.claim("nothing", "me")
    assert {state: n for state, n in queue.counts().items() if n} == {"succeeded": 1_500, "dead": 1, "cancelled": 1}
    with in_thread(queue, slots=1) as running:
        running.worker.upkeep._prune_at = 0.0
        running.worker.wake.ring()
        wait_for(lambda: running.worker.upkeep._prune_at > 0)
        assert not told.of(events.HistoryPruned), "they ended a moment ago"
        queue.database.clock.advance(3601)
        running.worker.upkeep._prune_at = 0.0
        running.worker.wake.ring()
        wait_all(queue, lambda counts: counts == {"dead": 1})
    assert [event.rows for event in told.of(events.HistoryPruned)] == [1_000, 501], "in small batches"


@pytest.mark.databases("postgres")
@pytest.mark.req("D11", "D13")
def test_work_maintenance_and_operators_do_not_deadlock(make_queue: MakeQueue, postgres: Server) -> None:
    """C105. River, kombu: statements for promotion, rescue and deletion locked rows in other orders than the claims did. Here are
    workers, upkeep, cancels, retries, purges, and producers whose transactions stay open for a while."""
    queue = make_queue(poll=0.02, workers=8)
    name = str(queue.database.url.database)
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = %s"

    @queue.job(max_attempts=3, timeout=20, retry=0.01)
    def job(number: Number) -> None:
        if number.n % 10 == 0:
            raise ValueError

    stop = threading.Event()
    errors: list[BaseException] = []

    def again_and_again(call: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                while not stop.is_set():
                    call()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def by_hand() -> None:
        for found in queue.jobs(limit=20):
            for verb in (queue.cancel, queue.retry):
                try:
                    verb(found.id)
                except (dbqueue.IllegalMove, dbqueue.JobNotFound, KeyTaken):
                    pass
                except QueueError as error:
                    errors.append(error)

    def joined(producer: str) -> None:
        with psycopg.connect(postgres.dsn(name)) as own, dbqueue.using(own):
            job.enqueue_many([Number(n) for n in range(20)], keys=[f"{producer}{n}" for n in range(20)])
            threading.Event().wait(0.05)

    with in_thread(queue, slots=4), in_thread(queue, slots=4), in_thread(queue, slots=4):
        dialect, ended = queue.database.dialect, ["succeeded", "cancelled", "dead"]
        threads = [
            again_and_again(by_hand),
            *(again_and_again(lambda: queue.purge(ended, limit=50)) for _ in range(2)),
            *(
                again_and_again(lambda: queue.database.run(lambda s: dialect.upkeep(s, 50, ("default",))))
                for _ in range(2)
            ),
            again_and_again(lambda: joined("a")),
            again_and_again(lambda: joined("b")),
        ]
        for _ in range(20):
            job.enqueue_many([Number(n) for n in range(40)], delay=0.1)
            threading.Event().wait(0.05)
        stop.set()
        for thread in threads:
            thread.join(10)
        wait_all(queue, lambda counts: not counts.keys() & {"pending", "running"})
    assert not errors
    assert postgres.execute(deadlocks, (name,)) == [(0,)]


@pytest.mark.databases("postgres")
@pytest.mark.req("D7")
def test_no_number_in_the_schema_runs_out(queue: DBQueue) -> None:
    """C108. PgQueuer: ids came from a 32-bit sequence, so nothing can be enqueued after 2.1 billion jobs. Ours are made by the
    client. The one sequence, of short-lived messages, has 64 bits, and so has what counts instants."""
    columns = """
        SELECT column_name, data_type FROM information_schema.columns
        WHERE table_name IN ('dbqueue_jobs', 'dbqueue_finished') AND data_type IN ('integer', 'smallint')
    """
    with queue.database.session() as session:
        assert session.execute("SELECT min(seqmax) FROM pg_sequence") == [(2**63 - 1,)]
        small = {name for name, _ in session.execute(columns)}
    assert small == {"attempt", "lapses", "max_attempts", "timeout_ms", "priority", "state", "on_crash"}
