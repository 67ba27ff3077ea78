"""`dbqueue beat` as a process: what it writes, how it ends, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dbqueue import DBQueue
from tests.doors.conftest import ROOT, Run
from tests.waiting import wait_for

APP = """
from dbqueue import DBQueue
queue = DBQueue("{url}")
queue.periodic("often", "@every 1s", "reports", "p4yload")
"""


class Process:
    def __init__(self, folder: Path, *words: str) -> None:
        self.out = folder / "beat.log"
        with self.out.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "dbqueue", "beat", *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=file, stderr=file,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.out.read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        wait_for(lambda: self.log.count(text) >= count, 20, self.log)

    def ended(self) -> int:
        return self.popen.wait(15)


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Process] = []

    def start(*words: str) -> Process:
        made.append(Process(tmp_path, *words))
        return made[-1]

    yield start
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_fires_what_the_code_declares_and_ends_cleanly(
    queue: DBQueue, database_url: str, start: Start, number: signal.Signals
) -> None:
    Path("shop.py").write_text(APP.format(url=database_url))
    beat = start("-A", "shop", "-n", "clock@%n", "-l", "info")
    beat.wait_for("schedule often fired", 2)
    beat.popen.send_signal(number)
    assert beat.ended() == 0
    lines = beat.log.splitlines()
    assert "beat clock@" in lines[0]
    assert " stopped: " in lines[-1]
    assert f"{len(lines) - 2} jobs fired" in lines[-1]
    assert "p4yload" not in beat.log
    jobs = queue.jobs(limit=100)
    assert len(jobs) == len({job.sequence for job in jobs}) == len(lines) - 2


def test_it_needs_no_code(queue: DBQueue, database_url: str, start: Start) -> None:
    queue.schedule("often", "@every 1s", "reports", 1)
    beat = start("--url", database_url, "--log-format", "json", "--max-interval", "0.2")
    beat.wait_for("often")
    queue.schedule("new", "@every 1s", "reports", 1)  # it is noticed without a restart
    beat.wait_for("new")
    beat.popen.terminate()
    assert beat.ended() == 0
    assert all(json.loads(line) for line in beat.log.splitlines())


def test_what_is_wrong_with_its_options(cli: Run, queue: DBQueue, database_url: str) -> None:
    Path("shop.py").write_text(APP.format(url=database_url))
    assert cli("beat", "--url", database_url, "-A", "shop").code == 2
    assert cli("beat", "--url", database_url, "--max-interval", "0").code == 2
    assert cli("beat", "--url", database_url, "-l", "loud").code == 2
    assert cli("beat", "--url", "nonsense").code == 2
    assert cli("beat", "-A", "no_such_module").code == 2
    assert cli("beat", "--url", database_url, "-n", "").code == 2
    assert queue.schedules() == []


@pytest.mark.databases("postgres")
def test_a_database_that_is_not_there_at_its_start(cli: Run) -> None:
    answer = cli("beat", "--url", "postgresql://u:p4ssw0rd@127.0.0.1:1/d")
    assert answer.code == 3
    assert "p4ssw0rd" not in answer.err


def test_code_that_is_not_there_any_more_is_named(queue: DBQueue, database_url: str, start: Start) -> None:
    queue.periodic("gone", "0 0 1 1 *", "reports", 1)
    queue.start_schedules()
    Path("shop.py").write_text(APP.format(url=database_url))
    beat = start("-A", "shop")
    beat.wait_for("schedule gone was declared in code")
    beat.popen.terminate()
    assert beat.ended() == 0
