"""What a worker costs that has nothing to do. These are figures we publish, so they are bounds, not wishes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from dbqueue import DBQueue, events
from tests.runtimes.jobs import Jobs, Nap
from tests.runtimes.lab import Process, Told, in_thread, wait_state
from tests.servers import Server
from tests.waiting import wait_for

STATEMENTS_PER_SECOND = 10
CPU_SHARE = 0.03
SECONDS = 2.0


@pytest.mark.databases("postgres")
def test_statements_per_idle_second(make_server: Callable[..., Server]) -> None:
    """As the server counts them, on all of the worker's connections, at the default settings."""
    server = make_server(18, shared_preload_libraries="pg_stat_statements")
    queue = DBQueue(server.dsn(name := server.create_database()))

    @queue.job(max_attempts=1, timeout=30)
    def job() -> None: ...

    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION pg_stat_statements")

        def calls() -> tuple[int, list[tuple[int, str]]]:
            rows = connection.execute(
                "SELECT calls, left(query, 60) FROM pg_stat_statements "
                "WHERE query NOT LIKE '%pg_stat_statements%' ORDER BY 1 DESC"
            ).fetchall()
            return sum(row[0] for row in rows), rows

        with in_thread(queue) as running:
            running.asleep()
            before, began = calls()[0], time.monotonic()
            threading.Event().wait(SECONDS)
            after, seconds = calls(), time.monotonic() - began
            rate = (after[0] - before) / seconds
            sessions = connection.execute(
                "SELECT query FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()", (name,)
            ).fetchall()
    queue.close()
    assert rate <= STATEMENTS_PER_SECOND, (rate, after[1])
    assert len(sessions) <= 2, sessions


@pytest.mark.databases("postgres")
def test_a_poll_of_half_a_minute_is_as_quiet_as_it_says(make_server: Callable[..., Server]) -> None:
    server = make_server(18, shared_preload_libraries="pg_stat_statements")
    queue = DBQueue(server.dsn(name := server.create_database()), poll=30)

    @queue.job(max_attempts=1, timeout=30)
    def job() -> None: ...

    with psycopg.connect(server.dsn(name), autocommit=True) as connection, in_thread(queue) as running:
        connection.execute("CREATE EXTENSION pg_stat_statements")
        running.asleep()
        threading.Event().wait(0.3)
        connection.execute("SELECT pg_stat_statements_reset()")
        threading.Event().wait(1.0)
        rows = connection.execute(
            "SELECT calls, left(query, 80) FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat_statements%'"
        ).fetchall()
    queue.close()
    assert sum(row[0] for row in rows) <= 2, rows


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_an_idle_process_uses_next_to_no_cpu(jobs: Jobs, start: Callable[..., Process]) -> None:
    worker = start("-c", 4, "--lease", 60).started()
    wait_state(jobs.queue, jobs.quick.enqueue(Nap()).id, "succeeded")
    threading.Event().wait(1.2)  # on SQLite it looks more often for a second after a job
    before, began = _cpu(worker.popen.pid), time.monotonic()
    threading.Event().wait(SECONDS)
    share = (_cpu(worker.popen.pid) - before) / (time.monotonic() - began)
    assert share < CPU_SHARE


@pytest.mark.req("D18")
@pytest.mark.databases("postgres")
def test_sessions_do_not_pile_up(queue: DBQueue, postgres: Server, told: Told) -> None:
    """Two a worker, also after its connections were cut again and again; and none when it has ended."""

    @queue.job(max_attempts=1, timeout=30)
    def job() -> None: ...

    queue.database._pool.dispose()  # type: ignore[union-attr]  # the one with which the fixture made the tables
    name = queue.database.url.database

    def sessions() -> int:
        found = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        return int(postgres.execute(found, (name,))[0][0])

    with in_thread(queue, slots=2) as running:
        for n in range(4):
            running.asleep()
            wait_for(lambda: sessions() == 2)
            if n % 2:
                running.cut()
            else:
                postgres.terminate_connections(str(name))
            wait_for(lambda n=n: len(told.of(events.DatabaseBack)) > n)  # type: ignore[misc]
        running.asleep()
        assert sessions() == 2
    wait_for(lambda: sessions() == 0)
