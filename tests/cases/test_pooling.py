"""Poolers, few connections, and connections that were there before a fork."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

from dbqueue import ConnectionLost, DBQueue
from tests.bouncer import bounced
from tests.runtimes.jobs import Gate, Jobs, Nap, notes, open_gate
from tests.runtimes.kids import alive, descendants
from tests.runtimes.lab import ROOT, Process, wait_all, wait_state
from tests.servers import Server
from tests.waiting import wait_for

APP = "tests.cases.app:queue"


@pytest.fixture
def app(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`app.py` on the test's database, as a worker process imports it."""
    monkeypatch.setenv("RUNTIMES_URL", database_url)
    monkeypatch.setenv("RUNTIMES_FOLDER", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.delitem(sys.modules, "tests.cases.app", raising=False)
    import tests.cases.app as app

    yield app
    app.queue.close()
    sys.modules.pop("tests.cases.app")


@pytest.mark.databases("postgres")
@pytest.mark.req("D11", "D18")
def test_through_a_small_transaction_pooler(
    app: ModuleType, postgres: Server, database_url: str, tmp_path: Path
) -> None:
    """C110. pq, psycopg: prepared statements exist already or not any more behind PgBouncer, and broken transactions stay in its pool.
    C112. good_job: claims were session locks, which are lost or never freed behind a pooler.
    Two workers whose jobs write more jobs share four connections of the server."""
    with ExitStack() as stack:
        url = stack.enter_context(bounced(database_url, "transaction", "default_pool_size = 4")) + "?pgbouncer=true"
        workers = [
            Process(url, tmp_path, "-c", 4, "-l", "warning", app=APP, options={"notify": False, "poll": 0.05})
            for _ in range(2)
        ]
        for worker in workers:
            stack.callback(worker.kill)
        for _ in range(10):
            app.spawn.enqueue(app.Spawn(5))
        wait_all(
            app.queue, lambda counts: counts == {"succeeded": 60, "pending": 3}
        )  # what importing the application sent
        numbers = notes(tmp_path, "number")
        assert set(Counter(line.job for line in numbers).values()) == {1}
        assert len(numbers) == 50
        name = app.queue.database.url.database
        sessions = "SELECT count(*), count(*) FILTER (WHERE state LIKE 'idle in transaction%%') FROM pg_stat_activity"
        through = " WHERE datname = %s AND application_name LIKE 'dbqueue%%' AND pid <> pg_backend_pid()"
        found = postgres.execute(sessions + through, (name,))[0]
        assert found[0] <= 4 + 1, "four of the pooler's, one of this test's own queue"
        assert found[1] == 0
        held = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE locktype = 'advisory' AND datname = %s"
        assert postgres.execute(held, (name,)) == [(0,)]
        assert [worker.log for worker in workers] == ["", ""]


@pytest.mark.databases("postgres")
@pytest.mark.req("D18", "D13")
def test_a_server_without_a_free_connection(make_server: Callable[..., Server], tmp_path: Path) -> None:
    """C113. Celery with a database: workers times pools exceed max_connections, and tasks fail with it. A worker needs two; one that
    lost them to others waits, and does its work when there is room again."""
    server = make_server(18, max_connections="20")
    url = server.dsn(name := server.create_database())
    jobs = Jobs(url, tmp_path)
    jobs.queue.database.ready()
    with ExitStack() as stack:
        worker = Process(url, tmp_path, "-c", 16, "--lease", 60)
        stack.callback(worker.kill)
        worker.started()
        jobs.queue.database._pool.dispose()  # type: ignore[union-attr]
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        wait_for(lambda: server.execute(sessions, (name,)) == [(2,)], message="an idle worker has its loop and LISTEN")
        refs = [jobs.gated.enqueue(Gate("g")).id for _ in range(4)]
        wait_for(lambda: len(notes(tmp_path, "start")) == 4)
        jobs.queue.database._pool.dispose()  # type: ignore[union-attr]
        guests = stack.enter_context(ExitStack())
        operator = guests.enter_context(psycopg.connect(server.dsn(), autocommit=True))
        cut = "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE datname = %s"

        def crowded_out() -> bool:
            """The worker may be the first to take a place that became free."""
            operator.execute(cut, (name,))
            take_all(guests, server.dsn())
            return operator.execute(sessions, (name,)).fetchone() == (0,)

        wait_for(crowded_out)
        wait_for(lambda: "trying again" in worker.log)
        with pytest.raises(ConnectionLost, match=r"53300|OperationalError"):
            jobs.quick.enqueue(Nap())
        open_gate(tmp_path, "g")
        guests.close()
        refs.append(jobs.quick.enqueue(Nap()).id)
        for ref in refs:
            assert wait_state(jobs.queue, ref, "succeeded").attempt == 1
        assert worker.popen.poll() is None
        jobs.queue.close()


def take_all(guests: ExitStack, url: str) -> None:
    """Connects until the server has no more room."""
    with suppress(psycopg.OperationalError):
        while True:
            guests.enter_context(psycopg.connect(url))


@pytest.mark.req("D18", "D11")
def test_children_do_not_share_the_connection_of_the_process_that_they_were_forked_from(
    app: ModuleType, start: Callable[..., Process], tmp_path: Path
) -> None:
    """C91. Celery with Django: the parent connects and forks, and all children speak on one socket."""
    worker = start("-P", "processes", "-c", 3, "--lease", 60, app=APP).started()
    for _ in range(9):
        app.spawn.enqueue(app.Spawn(8))
    wait_all(app.queue, lambda counts: counts.get("succeeded") == 81)
    numbers = notes(tmp_path, "number")
    assert len(numbers) == len({line.job for line in numbers}) == 72
    assert {line.attempt for line in notes(tmp_path)} == {1}
    pids = defaultdict(set)
    for line in notes(tmp_path):
        if line.what.startswith("session-"):
            pids[line.what].add(line.pid)
    assert worker.popen.pid not in set().union(*pids.values()), "they ran in children"
    if "session-sqlite" not in pids:
        assert {len(users) for users in pids.values()} == {1}, "one server process had two clients"
    assert "WARNING" not in worker.log


_FORKS = """
import os, sys
from dbqueue import DBQueue
from tests.cases.test_pooling import enqueues
queue = DBQueue(sys.argv[1])
job = queue.job(max_attempts=1, timeout=20, name="job")(enqueues)
job.enqueue()
children = []
for _ in range(3):
    children.append(os.fork())
    if not children[-1]:
        for _ in range(20):
            job.enqueue()
        os._exit(0)
for _ in range(20):
    job.enqueue()
ends = [os.waitpid(child, 0)[1] for child in children]
for _ in range(20):
    job.enqueue()
queue.close()
sys.exit(any(ends))
"""


def enqueues() -> None: ...


@pytest.mark.req("D6", "D18")
def test_a_forked_process_leaves_its_parents_connections_alone(queue: DBQueue) -> None:
    """C91, for a web server that forks: parent and children go on enqueueing, each on connections of its own."""
    url = queue.database.url.render_as_string(hide_password=False)
    done = subprocess.run([sys.executable, "-c", _FORKS, url], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert queue.counts()["pending"] == 1 + 60 + 40


@pytest.mark.req("D11", "D14")
def test_children_that_are_replaced_after_each_job_lose_none(
    app: ModuleType, start: Callable[..., Process], tmp_path: Path
) -> None:
    """C93. Celery: with a new child for each task, now and then a task is lost or the worker hangs, most of all when tasks raise."""
    for n in range(8):
        (app.number if n % 7 else app.fails).enqueue(app.Number(n))
    worker = start("-P", "processes", "-c", 3, "--max-jobs-per-child", 1, "--once", "--lease", 60, app=APP)
    wait_all(app.queue, lambda counts: counts.get("succeeded") == 6 and counts.get("dead") == 2)
    assert worker.ended() == 0
    pids = [line.pid for line in notes(tmp_path)]
    assert len(pids) == len(set(pids)) == 6 + 2 * 2
    assert not alive(descendants(worker.popen.pid))
