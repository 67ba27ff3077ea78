"""`dbqueue worker --processes N`: workers of their own from one command, looked after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue
from dbqueue.cli import supervisor
from dbqueue.cli.supervisor import supervise, without
from tests.doors.conftest import ROOT
from tests.waiting import wait_for

APP = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from dbqueue import DBQueue, current_job

queue = DBQueue({url!r})

@dataclass(frozen=True)
class Do:
    what: str

@queue.job(max_attempts=5, timeout=1, retry=0.01)
def act(do: Do) -> None:
    with open("notes", "a") as file:
        file.write(f"{{do.what}} {{os.getpid()}}\\n")
    if do.what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + 30
    while do.what == "gate" and not Path("open").exists() and time.monotonic() < until:
        time.sleep(0.01)
"""


class Supervised:
    def __init__(self, *args: object) -> None:
        self.file = Path("log")
        with self.file.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "dbqueue", "worker", "-A", "shop", *map(str, args)],
                env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.file.read_text()

    def workers(self) -> list[int]:
        """Those that have connected, in the order in which they did: their names tell their processes."""
        lines = [line for line in self.log.splitlines() if " slots, lease " in line]
        return [int(line.split(" on ")[0].split(":")[-3]) for line in lines]

    def wait(self, count: int) -> list[int]:
        wait_for(lambda: len(self.workers()) >= count, message=f"no {count} workers")
        return self.workers()

    def ended(self) -> int:
        try:
            return self.popen.wait(15)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.log}") from None


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def notes(what: str) -> list[int]:
    lines = Path("notes").read_text().splitlines() if Path("notes").exists() else []
    return [int(line.split()[1]) for line in lines if line.split()[0] == what]


@pytest.fixture
def shop(queue: DBQueue, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    Path("shop.py").write_text(APP.format(url=database_url))
    monkeypatch.syspath_prepend(tmp_path)
    import shop  # type: ignore[import-not-found]

    yield shop
    shop.queue.close()


@pytest.fixture
def run() -> Iterator[Callable[..., Supervised]]:
    made: list[Supervised] = []

    def run(*args: object) -> Supervised:
        made.append(Supervised(*args))
        return made[-1]

    yield run
    for each in made:
        each.popen.kill()
        each.popen.wait()
        for pid in each.workers():
            wait_for(lambda pid=pid: gone(pid))  # type: ignore[misc]


@pytest.mark.req("D12", "D19")
def test_a_worker_that_is_killed_is_replaced_and_a_signal_ends_them_all(
    shop: Any, run: Callable[..., Supervised]
) -> None:
    running = run("--processes", 2, "-c", 1, "--lease", 30)
    first, second = running.wait(2)
    os.kill(first, signal.SIGKILL)
    third = running.wait(3)[-1]
    assert "a worker process ended with code 137; another one starts in 0.5 s" in running.log
    jobs = [shop.act.enqueue(shop.Do("gate")).id for _ in range(2)]
    wait_for(lambda: sorted(notes("gate")) == sorted([second, third]))
    running.popen.send_signal(signal.SIGTERM)
    wait_for(lambda: running.log.count(" stops (SIGTERM), 1 jobs running") == 2)
    Path("open").touch()
    assert running.ended() == 0
    assert [shop.queue.get_job(job).state for job in jobs] == ["succeeded"] * 2
    assert gone(second)
    assert gone(third)


@pytest.mark.req("D19")
@pytest.mark.databases("sqlite")
def test_a_second_signal_hurries_them(shop: Any, run: Callable[..., Supervised]) -> None:
    running = run("--processes=1", "-c", 1, "--lease", 30)
    running.wait(1)
    job = shop.act.enqueue(shop.Do("gate"))
    wait_for(lambda: notes("gate"))
    running.popen.send_signal(signal.SIGINT)
    wait_for(lambda: " stops (SIGTERM)" in running.log)
    running.popen.send_signal(signal.SIGTERM)
    assert running.ended() == 0
    assert shop.queue.get_job(job.id).state in ("pending", "dead")
    assert not Path("open").exists()


@pytest.mark.req("D11")
@pytest.mark.databases("postgres")
def test_once_ends(shop: Any, run: Callable[..., Supervised]) -> None:
    jobs = [shop.act.enqueue(shop.Do("quick")).id for _ in range(20)]
    assert run("--once", "--processes", 2, "-P", "prefork", "-c", 1).ended() == 0
    assert {shop.queue.get_job(job).state for job in jobs} == {"succeeded"}


@pytest.mark.req("D19")
@pytest.mark.databases("sqlite")
def test_workers_end_with_a_supervisor_that_is_killed(shop: Any, run: Callable[..., Supervised]) -> None:
    running = run("--processes", 1, "-c", 1, "--lease", 30)
    (worker,) = running.wait(1)
    running.popen.kill()
    wait_for(lambda: gone(worker))
    assert " stops (SIGTERM)" in running.log


@pytest.mark.databases("sqlite")
def test_a_configuration_that_no_worker_can_run_with_is_not_tried_for_ever(
    database_url: str, run: Callable[..., Supervised]
) -> None:
    running = run("--processes", 2)
    assert running.ended() == 2
    assert "there is no module 'shop'" in running.log


# -- the supervisor alone, with other programs in place of workers -----------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What runs instead of workers."""
    popen = subprocess.Popen

    def replace(code: str) -> None:
        def start(command: list[str], **more: Any) -> Any:
            return popen([sys.executable, "-S", "-c", code], **more)

        monkeypatch.setattr("dbqueue.cli.supervisor.subprocess.Popen", start)

    return replace


COUNTED = """
import os, sys, time
open("runs", "a").write("x")
n = len(open("runs").read())
"""


def test_75_starts_again_at_once(program: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    program(COUNTED + "sys.exit(75 if n < 3 else 0)")
    assert supervise([], 1) == 0
    assert Path("runs").read_text() == "xxx"
    assert [record.args for record in caplog.records] == [(75, 0.0), (75, 0.0)]


def test_other_ends_are_followed_by_pauses_that_grow(
    program: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.02)
    program(COUNTED + "sys.exit(1 if n < 4 else 0)")
    assert supervise([], 1) == 0
    assert [record.args for record in caplog.records] == [(1, 0.02), (1, 0.04), (1, 0.05)]


@pytest.mark.req("D19")
def test_a_signal_in_the_middle_of_a_start_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        started = popen(["sleep", "60"], **more)
        signal.raise_signal(signal.SIGTERM)
        return started

    monkeypatch.setattr("dbqueue.cli.supervisor.subprocess.Popen", start)
    assert supervise([], 2) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_worker_is_started_without_the_option() -> None:
    line = ["-A", "shop", "worker", "--processes", "3", "-c", "2", "--processes=4"]
    assert without(line, "--processes") == ["-A", "shop", "worker", "-c", "2"]
