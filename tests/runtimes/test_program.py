"""One program with two roots: what is refused before it starts, who ends whom, and in which order (D17, D18, D19).

Signals, order and what a kill leaves are tested on real processes of ``tests/runtimes/served.py``; the rest in this
one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbqueue import Closed, ConfigError, ConnectionLost, DBQueue, InvalidArgument, Runtime, SchemaTooNew
from dbqueue import settings as config
from dbqueue.database.engine import Database
from dbqueue.runtime import worker as worker_module
from dbqueue.settings import JobSettings, RuntimeSettings, Settings
from tests.runtimes.served import Do, work
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("DBQUEUE_")]:
        monkeypatch.delenv(variable)


def settings(mode: str | None = "all", shutdown_ms: int = 20_000, **jobs: Any) -> Settings:
    return Settings(
        runtime=RuntimeSettings(mode=mode, shutdown_ms=shutdown_ms),  # type: ignore[arg-type]
        jobs=JobSettings(**jobs),
    )


# -- real processes ----------------------------------------------------------------------------------------------------


class Program:
    """A process of ``served.py``, and the queue on its database as another process sees it."""

    def __init__(self, folder: Path, mode: str, shutdown_ms: int) -> None:
        self.folder = folder
        self.queue = DBQueue(f"sqlite:///{folder / 'jobs.db'}")
        self.queue.migrate()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.runtimes.served", str(folder), mode, str(shutdown_ms)],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
        )  # fmt: skip

    def phases(self) -> list[str]:
        path = self.folder / "phases"
        return path.read_text().splitlines() if path.exists() else []

    def reach(self, phase: str) -> None:
        def reached() -> bool:
            assert self.popen.stderr is not None
            assert self.popen.poll() is None or phase in self.phases(), self.popen.stderr.read()
            return phase in self.phases()

        wait_for(reached, message=f"{phase!r} was not reached")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int((self.folder / "port").read_text())), timeout=20)

    def enqueue(self, name: str, *, deaf: bool = False) -> Any:
        """``work`` is declared on a queue that leads elsewhere in this process."""
        with work._writer.rebound(self.queue.settings):  # type: ignore[attr-defined]
            return work.enqueue(Do(name, deaf)).id

    def state(self, job_id: Any) -> tuple[str, int]:
        record = self.queue.get_job(job_id)
        assert record is not None
        return record.state, record.attempt

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def ended(self) -> int:
        return self.popen.wait(20)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    made: list[Program] = []

    def start(mode: str, shutdown_ms: int = 20_000) -> Program:
        made.append(Program(tmp_path, mode, shutdown_ms))
        return made[-1]

    yield start
    for one in made:
        one.popen.kill()
        one.popen.wait()
        assert one.popen.stderr is not None
        one.popen.stderr.close()
        one.queue.close()


@pytest.mark.req("D19")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_order_of_the_end(program: Callable[..., Program], number: int) -> None:
    served = program("all")
    served.reach("the API listens")
    first = served.enqueue("first")
    served.reach("first begins")
    with served.connect() as request:
        request.sendall(b"slow")
        served.reach("a request begins")

        served.signal(number)
        served.reach("the listener is closed")
        with pytest.raises(ConnectionRefusedError):
            served.connect()
        assert "claiming stops" not in served.phases()
        (served.folder / "answer").touch()
        assert request.recv(10) == b"done", "a request that was accepted is answered"
    served.reach("claiming stops")
    left = served.enqueue("left")
    assert served.state(first) == ("running", 1)
    (served.folder / "last").touch()
    (served.folder / "first").touch()

    assert served.ended() == 0
    phases = [
        phase for phase in served.phases() if not phase.startswith("last")
    ]  # claimed, or not any more: both are right
    assert phases == [
        "the application begins",
        "the API listens",
        "first begins",
        "a request begins",
        "the listener is closed",
        "the API has drained",
        "claiming stops",
        "first ends",
        "the jobs have ended",
        "the application ends, the database knows 3 jobs",
        "the log is flushed, the database was closed before",
        "exit 0",
    ]
    assert served.state(first)[0] == "succeeded"
    assert served.state(left) == ("pending", 0)


@pytest.mark.req("D19")
def test_what_is_left_at_shutdown_ms_is_cancelled_and_handed_back(program: Callable[..., Program]) -> None:
    served = program("worker", shutdown_ms=200)
    jobs = [served.enqueue("hears"), served.enqueue("deaf", deaf=True)]
    served.reach("hears begins")
    served.reach("deaf begins")
    served.signal()
    assert served.ended() == 0
    phases = served.phases()
    assert phases[-6:] == [
        "claiming stops",
        "hears is cancelled",
        "the jobs have ended",
        "the application ends, the database knows 2 jobs",
        "the log is flushed, the database was closed before",
        "exit 0",
    ]
    assert "the API listens" not in phases
    assert [served.state(job) for job in jobs] == [("pending", 0), ("pending", 0)], (
        "an interrupted attempt is given back"
    )


@pytest.mark.req("D19")
def test_an_api_that_does_not_drain_shares_the_time_with_the_jobs(program: Callable[..., Program]) -> None:
    served = program("all", shutdown_ms=300)
    served.reach("the API listens")
    job = served.enqueue("hears")
    with served.connect() as request:
        request.sendall(b"slow")
        served.reach("a request begins")
        served.reach("hears begins")
        served.signal()
        assert served.ended() == 0
    phases = served.phases()
    assert "the API has drained" not in phases
    assert phases.index("claiming stops") < phases.index("hears is cancelled")
    assert phases[-1] == "exit 0"
    assert served.state(job) == ("pending", 0)
    assert "left behind" in (served.folder / "log").read_text()


@pytest.mark.req("D19")
def test_a_second_signal_hurries(program: Callable[..., Program]) -> None:
    served = program("all", shutdown_ms=3_600_000)
    served.reach("the API listens")
    job = served.enqueue("hears")
    with served.connect() as request:
        request.sendall(b"slow")
        served.reach("a request begins")
        served.reach("hears begins")
        served.signal()
        served.reach("the listener is closed")
        served.signal(signal.SIGINT)
        assert served.ended() == 0
    assert served.phases()[-1] == "exit 0"
    assert served.state(job) == ("pending", 0)


@pytest.mark.req("D17", "D19")
def test_in_mode_api_no_job_is_touched(program: Callable[..., Program]) -> None:
    served = program("api")
    job = served.enqueue("first")
    served.reach("the API listens")
    with served.connect() as request:
        request.sendall(b"slow")
        (served.folder / "answer").touch()
        assert request.recv(10) == b"done", "it enqueues"
    served.signal()
    assert served.ended() == 0
    assert served.phases() == [
        "the application begins",
        "the API listens",
        "a request begins",
        "the listener is closed",
        "the API has drained",
        "the application ends, the database knows 2 jobs",
        "the log is flushed, the database was closed before",
        "exit 0",
    ]
    assert served.state(job) == ("pending", 0)


@pytest.mark.req("D19")
def test_an_api_that_crashes_takes_the_jobs_down_in_order(program: Callable[..., Program]) -> None:
    served = program("all")
    served.reach("the API listens")
    job = served.enqueue("first")
    served.reach("first begins")
    with served.connect() as request:
        request.sendall(b"crash")
        served.reach("claiming stops")
    (served.folder / "first").touch()
    assert served.ended() == 1
    assert served.phases()[-6:] == [
        "claiming stops",
        "first ends",
        "the jobs have ended",
        "the application ends, the database knows 1 jobs",
        "the log is flushed, the database was closed before",
        "exit 1",
    ]
    assert served.state(job)[0] == "succeeded"
    log = (served.folder / "log").read_text()
    assert "the API crashed\nTraceback" in log
    assert "Bad file descriptor" in log


# -- in this process ---------------------------------------------------------------------------------------------------


class Api:
    """Serves until it is closed; ``during`` runs on its thread first."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self._during, self._closing = during, threading.Event()
        self.served = self.closed = 0

    def serve(self) -> None:
        self.served += 1
        self._during()
        assert self._closing.wait(20)

    def close(self) -> None:
        self.closed += 1
        self._closing.set()


class Application:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> None:
        self.seen.append("begins")

    def __exit__(self, *error: object) -> None:
        self.seen.append("ends" if error == (None, None, None) else "fails")


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DBQueue]:
    queue = DBQueue(f"sqlite:///{tmp_path / 'jobs.db'}", poll=0.01)
    yield queue
    queue.close()


def declare(queue: DBQueue, handler: Callable[[], object] = lambda: None, *, timeout: float = 30) -> Any:
    @queue.job(max_attempts=1, timeout=timeout, name="work")
    def work() -> None:
        handler()

    return work


@pytest.mark.req("D17")
def test_mode_all_runs_both_roots_of_one_entry_point(queue: DBQueue) -> None:
    done = threading.Event()
    target = declare(queue, done.set)

    def during() -> None:
        target.enqueue()
        assert done.wait(20)
        runtime.stop()

    api, application = Api(during), Application()
    runtime = Runtime(settings("all"), application=application)
    assert runtime.run(api=api, jobs=queue) == 0
    assert (api.served, api.closed, application.seen) == (1, 1, ["begins", "ends"])
    with pytest.raises(Closed):
        queue.counts()
    with pytest.raises(InvalidArgument, match="runs once"):
        runtime.run(api=api)


@pytest.mark.req("D17")
def test_the_api_is_left_alone_in_mode_worker(queue: DBQueue) -> None:
    api = Api()
    runtime = Runtime(settings("worker"))
    declare(queue, runtime.stop).enqueue()
    assert runtime.run(api=api, jobs=queue) == 0
    assert (api.served, api.closed) == (0, 0)


@pytest.mark.req("D17")
def test_a_root_in_the_others_mode_is_a_no_op(queue: DBQueue, caplog: pytest.LogCaptureFixture) -> None:
    job = declare(queue).enqueue()
    application = Application()
    assert Runtime(settings("api"), application=application).run(jobs=queue) == 0
    assert Runtime(settings("worker"), application=application).run(api=Api()) == 0
    assert application.seen == []
    assert queue.get_job(job.id).state == "pending"  # type: ignore[union-attr]
    assert caplog.text.count("nothing to run") == 2


@pytest.mark.req("D17")
def test_a_program_without_jobs_may_leave_the_mode_out_and_one_with_jobs_states_it(queue: DBQueue) -> None:
    runtime = Runtime()
    api = Api(runtime.stop)
    assert runtime.run(api=api) == 0
    assert api.served == 1
    for stated in (None, settings(None)):
        with pytest.raises(ConfigError, match="the runtime mode is not stated"):
            Runtime(stated).run(api=api, jobs=queue)
    with pytest.raises(InvalidArgument, match="runs nothing"):
        Runtime().run()
    assert api.served == 1


@pytest.mark.req("D17")
def test_settings_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("dbqueue.toml").write_text(
        f"[runtime]\nmode = 'worker'\n[jobs]\nurl = 'sqlite:///{tmp_path}/jobs.db'\nworkers = 3\n"
    )
    reads: list[int] = []
    original = config._read_file

    def read(*given: Any) -> Any:
        reads.append(1)
        return original(*given)

    monkeypatch.setattr(config, "_read_file", read)
    queue = DBQueue(lease=100)
    seen: list[tuple[int, int]] = []

    class Enqueuing(Application):
        def __enter__(self) -> None:
            target.enqueue()

    def during() -> None:
        assert runtime._worker is not None
        seen.append((runtime._worker.slots.size, runtime._worker.lease))
        runtime.stop()

    target, runtime = declare(queue, during), Runtime(application=Enqueuing())
    assert reads == []
    assert runtime.run(jobs=queue) == 0
    assert seen == [(3, 100_000_000)], "the file's slots, the code's lease"
    assert len(reads) == 1


# -- refused before anything starts ------------------------------------------------------------------------------------


def refused(error: type[Exception], match: str, given: Settings | None, queue: DBQueue) -> None:
    api, application = Api(), Application()
    with pytest.raises(error, match=match):
        Runtime(given, application=application).run(api=api, jobs=queue)
    assert (api.served, application.seen) == (0, [])


@pytest.mark.req("D17")
@pytest.mark.parametrize(
    "broken", ["DBQUEUE_WORKERS=0", "DBQUEUE_MODE=both", "DBQUEUE_SHUTDOWN_MS=1.5", "DBQUEUE_NONSENSE=1"]
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    queue: DBQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    monkeypatch.setenv("DBQUEUE_MODE", "all")
    monkeypatch.setenv(*broken.split("="))
    refused(ConfigError, broken.split("=")[0], None, queue)
    assert not (tmp_path / "jobs.db").exists()


@pytest.mark.req("D18")
@pytest.mark.parametrize("mode", ["worker", "all"])
def test_the_lease_rule_is_checked_before_anything_starts(queue: DBQueue, tmp_path: Path, mode: str) -> None:
    declare(queue, timeout=60)  # the lease is 60 s too
    refused(ConfigError, "it must exceed every target's timeout; it does not for 'work'", settings(mode), queue)
    assert not (tmp_path / "jobs.db").exists()


@pytest.mark.req("D18")
def test_handlers_and_the_api_find_connections_in_the_pool(queue: DBQueue) -> None:
    """workers + 1: with every slot in the pool there is one for the API, and the worker's own stand beside them."""
    meet = threading.Barrier(queue.settings.workers + 1, timeout=10)

    def hold() -> None:
        with queue.database.session():
            meet.wait()

    target = declare(queue, hold)

    def during() -> None:
        for _ in range(queue.settings.workers):
            target.enqueue()
        hold()
        wait_for(lambda: queue.counts() == {"succeeded": queue.settings.workers})
        runtime.stop()

    runtime = Runtime(settings("all"))
    assert runtime.run(api=Api(during), jobs=queue) == 0


@pytest.mark.req("D17")
@pytest.mark.parametrize("mode", ["api", "worker", "all"])
def test_a_missing_driver_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    refused(ConfigError, "needs the driver psycopg 3", settings(mode), DBQueue("postgresql://app@127.0.0.1:1/shop"))


@pytest.mark.req("D17")
@pytest.mark.parametrize("mode", ["worker", "all"])
def test_jobs_do_not_start_without_their_database(mode: str) -> None:
    refused(ConnectionLost, "connection", settings(mode), DBQueue("postgresql://app@127.0.0.1:1/shop"))


def test_an_api_starts_without_the_jobs_database(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(settings("api"))
    assert runtime.run(api=Api(runtime.stop), jobs=DBQueue("postgresql://app@127.0.0.1:1/shop")) == 0
    assert "cannot be reached (ConnectionLost)" in caplog.text


@pytest.mark.req("D6", "D17")
def test_a_schema_that_is_too_new_is_refused_before_the_api_listens(
    queue: DBQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_new(database: Database) -> None:
        raise SchemaTooNew("upgrade")

    monkeypatch.setattr(Database, "ready", too_new)
    api, application = Api(), Application()
    assert Runtime(settings("all"), application=application).run(api=api, jobs=queue) == 1
    assert (api.served, application.seen) == (0, ["begins", "ends"]), "it may make the schema itself"
    assert "SchemaTooNew: upgrade" in caplog.text


@pytest.mark.req("D17")
@pytest.mark.parametrize(
    ("options", "stated", "message"),
    [
        ({}, {"url": "sqlite:///other.db"}, "url in the settings is not the one"),
        ({}, {"listen_url": "sqlite:///other.db"}, "listen_url in the settings is not the one"),
        ({}, {"workers": 8}, r"the settings say workers = int 8, but the queue uses int 4.*DBQueue\(workers=...\)"),
        ({}, {"lease_ms": 9_000}, r"lease_ms = int 9000.*DBQueue\(lease=...\)"),
        ({"workers": 2}, {"notify": False}, "notify = bool"),
    ],
)
def test_settings_that_would_not_count_are_refused(
    options: dict[str, Any], stated: dict[str, Any], message: str
) -> None:
    refused(ConfigError, message, settings("all", **stated), DBQueue("sqlite:///jobs.db", **options))
    assert not Path("jobs.db").exists()


@pytest.mark.req("D17")
@pytest.mark.parametrize(
    ("url", "options", "stated"),
    [
        (None, {}, {"url": "sqlite:///jobs.db", "workers": 8}),
        (None, {"workers": 2}, {"url": "sqlite:///jobs.db", "workers": 8, "lease_ms": 9_000}),
        ("sqlite:///jobs.db", {"workers": 2}, {"workers": 8}),
        ("sqlite+pysqlite:///jobs.db", {}, {"url": "dbqueue+sqlite:///jobs.db"}),
        ("sqlite:///jobs.db", {"workers": 8}, {"url": "sqlite:///jobs.db", "workers": 8, "poll_ms": 250}),
    ],
)
def test_settings_that_agree_are_used(url: str | None, options: dict[str, Any], stated: dict[str, Any]) -> None:
    queue = DBQueue(url, **options)
    runtime = Runtime(settings("all", **stated))
    assert runtime.run(api=Api(runtime.stop), jobs=queue) == 0
    assert queue.settings.workers == options.get("workers", stated.get("workers", 4))
    if url is None and "lease_ms" in stated:
        assert queue.settings.lease_ms == 9_000


@pytest.mark.req("D17")
def test_a_queue_that_was_used_before_with_other_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBQUEUE_URL", "sqlite:///used.db")
    queue = DBQueue()
    assert queue.counts() == {}
    refused(ConfigError, "url in the settings is not the one", settings("all", url="sqlite:///other.db"), queue)
    queue.close()
    with pytest.raises(ConfigError, match="no database is named"):
        Runtime(settings("all")).run(api=Api(), jobs=DBQueue())


# -- who ends whom -----------------------------------------------------------------------------------------------------


@pytest.mark.req("D19")
@pytest.mark.parametrize("error", [RuntimeError("the port is taken"), SystemExit(3)], ids=repr)
def test_a_crash_of_the_api_ends_the_jobs(
    queue: DBQueue, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def crash() -> None:
        raise error

    application = Application()
    assert Runtime(settings("all"), application=application).run(api=Api(crash), jobs=queue) == 1
    assert application.seen == ["begins", "ends"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (record.getMessage(), record.exc_info[1]) == ("the API crashed", error)  # type: ignore[index]


@pytest.mark.req("D19")
def test_a_crash_of_the_worker_ends_the_api(
    queue: DBQueue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: object) -> float:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker_module.Worker, "step", crash)
    api, application = Api(), Application()
    assert Runtime(settings("all"), application=application).run(api=api, jobs=queue) == 1
    assert (api.served, api.closed, application.seen) == (1, 1, ["begins", "ends"])
    assert "the worker crashed" in caplog.text
    assert "RuntimeError: a bug" in caplog.text


@pytest.mark.req("D19")
def test_the_workers_own_exit_code_is_the_programs(queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module.Worker, "run", lambda _: worker_module.EXIT_ABANDONED)
    api = Api()
    assert Runtime(settings("all")).run(api=api, jobs=queue) == 75
    assert api.closed == 1


def test_an_api_that_ends_by_itself_ends_the_program(queue: DBQueue) -> None:
    api = Api()
    api._closing.set()
    assert Runtime(settings("all")).run(api=api, jobs=queue) == 0


@pytest.mark.req("D19")
def test_an_api_that_cannot_be_closed_holds_nobody_up(queue: DBQueue, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Api):
        def close(self) -> None:
            raise OSError("no such listener")

    runtime = Runtime(settings("all", shutdown_ms=3_600_000))
    api = Stuck(runtime.stop)
    assert runtime.run(api=api, jobs=queue) == 1
    api._closing.set()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == ["closing the API crashed"], "nobody waited until the API lost its own patience"


@pytest.mark.req("D19")
def test_an_api_that_does_not_drain_leaves_the_jobs_what_is_left_of_the_time(queue: DBQueue) -> None:
    never = threading.Event()

    class Endless(Api):
        def close(self) -> None:
            never.wait(20)

    runtime = Runtime(settings("all", shutdown_ms=50))
    api = Endless(runtime.stop)
    assert runtime.run(api=api, jobs=queue) == 0
    never.set()
    api._closing.set()
    assert runtime._worker is not None
    assert runtime._worker.options.shutdown == 0


@pytest.mark.req("D19")
@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_a_crash_of_the_application_closes_the_database(
    queue: DBQueue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("no resources")

    monkeypatch.setattr(Application, where, crash)
    runtime = Runtime(settings("all"), application=Application())
    api = Api(runtime.stop)
    assert runtime.run(api=api, jobs=queue) == 1
    assert api.served == (where == "__exit__")
    assert "the application crashed" in caplog.text
    with pytest.raises(Closed):
        queue.counts()


def test_a_stop_before_the_start_starts_nothing(queue: DBQueue) -> None:
    api, application = Api(), Application()
    runtime = Runtime(settings("all"), application=application)
    runtime.stop()
    assert runtime.run(api=api, jobs=queue) == 0
    assert (api.served, application.seen) == (0, ["begins", "ends"])
