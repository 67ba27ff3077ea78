"""`dbqueue worker --health-file` and `dbqueue health`: fresh while the loop comes round and the database answers, and
only then."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue
from dbqueue.errors import ConfigError
from dbqueue.runtime import health
from dbqueue.runtime.health import Health, pulse
from dbqueue.runtime.worker import Worker, WorkerOptions
from tests.doors.conftest import ROOT, Run
from tests.servers import Server
from tests.waiting import wait_for

APP = """
import time
from dbqueue import DBQueue
queue = DBQueue("{url}")

@queue.job(max_attempts=1, timeout=50)
def slow() -> None:
    while True:
        time.sleep(0.05)
"""


@contextmanager
def running(url: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process that writes ./health, once it has written it."""
    Path("shop.py").write_text(APP.format(url=url))
    command = [sys.executable, "-m", "dbqueue", "worker", "-A", "shop", "--health-file", "health", *options]
    with Path("log").open("wb") as log:
        worker = subprocess.Popen(command, stderr=log, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        wait_for(lambda: Path("health").exists(), message="the worker wrote nothing")
        yield worker
    finally:
        worker.kill()
        worker.wait()


def alive() -> bool:
    return pulse("health", 1.3).alive


# -- a worker as a process ---------------------------------------------------------------------------------------------


@pytest.mark.req("D19")
def test_the_life_of_a_worker(database_url: str, queue: DBQueue, cli: Run) -> None:
    assert cli("health", "health") == (1, "", "there is no health: the worker has not started, or has ended\n")
    with running(database_url) as worker:
        content = json.loads(Path("health").read_text())
        assert set(content) == {"pid", "worker", "time", "running", "connected", "last_turn"}
        assert (content["pid"], content["running"], content["connected"]) == (worker.pid, 0, True)
        assert 0 <= content["time"] - content["last_turn"] < 5
        code, out, err = cli("health", "health")
        assert (code, err) == (0, "")
        assert f"(pid {worker.pid}) was alive" in out
        worker.send_signal(signal.SIGSTOP)
        wait_for(lambda: not alive(), message="it is stopped and looks alive")
        code, out, err = cli("health", "health", "--max-age", 1)
        assert (code, out) == (1, "")
        assert "it is stuck or gone, or its database does not answer" in err
        worker.send_signal(signal.SIGCONT)
        wait_for(alive, message="it goes on and looks dead")
        worker.terminate()
        assert worker.wait(20) == 0
        assert not list(Path().glob("health*")), "a clean exit removes it"


@pytest.mark.databases("sqlite")
def test_a_long_job_and_a_long_goodbye_are_no_illness(database_url: str, queue: DBQueue) -> None:
    with running(database_url, "-c", "1", "--shutdown", "2") as worker:
        program = DBQueue(database_url)

        @program.job(max_attempts=1, timeout=50, name="shop.slow")
        def slow() -> None: ...

        slow.enqueue()
        program.close()
        wait_for(lambda: json.loads(Path("health").read_text())["running"] == 1)
        worker.terminate()
        before = json.loads(Path("health").read_text())["time"]
        wait_for(
            lambda: json.loads(Path("health").read_text())["time"] > before + 0.9, message="it stops and looks dead"
        )
        assert worker.wait(20) == 0
        assert not Path("health").exists()


@pytest.mark.databases("postgres")
def test_a_database_that_is_away_and_a_worker_that_is_killed(
    postgres: Server, database_url: str, queue: DBQueue
) -> None:
    with running(database_url) as worker:
        postgres.stop("immediate")
        wait_for(lambda: not alive(), message="its database is away and it looks alive")
        assert worker.poll() is None
        postgres.start()
        wait_for(alive, 20, message="its database is back and it looks dead")
        worker.kill()
        worker.wait()
        assert Path("health").exists(), "killed, it could not remove it"
        wait_for(lambda: not alive())


# -- the writer --------------------------------------------------------------------------------------------------------


def test_it_is_written_once_a_second_and_only_with_good_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    path = tmp_path / "health"
    writer = Health(str(path), "w", poll=0.25)

    def beat(after: float, *, connected: bool = True, silence: float = 0.0, stopping: bool = False) -> bool:
        now[0] += after
        path.unlink(missing_ok=True)
        writer.beat(2, connected, now[0] - silence, stopping=stopping)
        return path.exists()

    assert beat(0)
    assert not beat(0.5)
    assert beat(0.5)
    assert writer.next_at == now[0] + 1
    assert not beat(1, connected=False)
    assert beat(1, silence=9)
    assert not beat(1, silence=11)
    assert beat(1, silence=11, stopping=True)
    slow = Health(str(path), "w", poll=60)
    now[0] += 1
    slow.beat(2, True, now[0] - 170, stopping=False)
    assert path.exists(), "who polls once a minute cannot hear more often"
    assert os.listdir(tmp_path) == ["health"]
    writer.close()
    assert os.listdir(tmp_path) == []
    writer.close()


def test_without_a_path_nothing_happens(tmp_path: Path) -> None:
    writer = Health(None, "w", 1)
    writer.beat(0, True, time.monotonic(), stopping=False)
    writer.close()
    assert (os.listdir(tmp_path), writer.next_at) == ([], float("inf"))


@pytest.mark.parametrize("path", ["missing/health", "."])
def test_a_path_that_cannot_be_written_is_refused_before_the_start(cli: Run, queue: DBQueue, path: str) -> None:
    Path("shop.py").write_text(APP.format(url=queue.database.url.render_as_string(hide_password=False)))
    answer = cli("worker", "-A", "shop", "--once", "--health-file", path)
    assert (answer.code, answer.out) == (2, "")
    assert "cannot be written" in answer.err
    with pytest.raises(ConfigError):
        Worker(queue, WorkerOptions(health_file=path))


def test_several_workers_do_not_share_a_file(cli: Run) -> None:
    answer = cli("worker", "-A", "shop", "--processes", 2, "--health-file", "health")
    assert (answer.code, answer.out) == (2, "")
    assert "tells of one worker" in answer.err


def test_a_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Health(str(tmp_path / "health"), "w", 1)
    caplog.set_level(logging.WARNING)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.open", full)
    for _ in range(3):
        writer.next_at = 0.0
        writer.beat(0, True, time.monotonic(), stopping=False)
    assert [record.getMessage() for record in caplog.records] == [
        f"the health file {tmp_path / 'health'} cannot be written: OSError"
    ]


# -- the reader --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "running", "expected"),
    [
        (0, 3, "3 running"),
        (-14, 0, "alive 14"),
        (-16, 0, "16 s old"),
        (4, 0, "0.0 s ago"),
        (60, 0, "60 s in the future"),
    ],
)
def test_a_pulse(tmp_path: Path, shift: float, running: int, expected: str) -> None:
    path = tmp_path / "health"
    path.write_text(json.dumps({"pid": 7, "worker": "w", "time": time.time() + shift, "running": running}))
    found = pulse(str(path), 15)
    assert expected in found.sentence
    assert found.alive == (-15 < shift < 5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "\x00",
        '{"time": "x"}',
        '{"time": 1e99, "worker": "w"}',
        '{"time": NaN, "worker": "w", "pid": 7, "running": 0}',
    ],
)
def test_whatever_else_the_file_holds(tmp_path: Path, cli: Run, text: str) -> None:
    path = tmp_path / "health"
    path.write_text(text)
    code, out, err = cli("health", path)
    assert (code, out) == (1, "")
    assert ("cannot be read as a health file" in err) != ("NaN" in text)


def test_the_command_is_light(process: Run, tmp_path: Path) -> None:
    """It runs every few seconds, so it must not load what it does not need; mistakes are told as by every command."""
    probe = """
import sys
from dbqueue.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, "sqlalchemy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", probe, "health", str(tmp_path / "none")],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert done.stdout == "1 False\n"
    assert process("health", "--help").code == 0
    code, out, err = process("health", "x", "--max-age", "soon")
    assert (code, out) == (2, "")
    assert err.endswith("(see dbqueue health --help) [invalid_argument]\n")
