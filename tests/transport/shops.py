"""A Celery app in a folder, its real workers in processes of their own, and what its tasks noted."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

# Tasks of no other app: tests make many in one process, and each would get the shared ones of all that were before it.
APP = """
import os, time
from celery import Celery
app = Celery("shop", broker={broker!r}, backend={backend!r})
app.conf.update(
    broker_transport_options={options!r}, worker_prefetch_multiplier=2, broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False, task_default_queue="shop",
)

def note(text):
    with open({notes!r}, "a") as file:
        file.write(text + "\\n")

@app.task(shared=False)
def add(x, y):
    note(f"add {{x}} {{y}}")
    return x + y

@app.task(shared=False)
def slow(name, seconds):
    note(f"start {{name}}")
    time.sleep(seconds)
    note(f"end {{name}}")

@app.task(shared=False, acks_late=True, reject_on_worker_lost=True)
def late(name, seconds):
    note(f"start {{name}}")
    time.sleep(seconds)
    note(f"end {{name}}")

@app.task(shared=False, bind=True, max_retries=3)
def flaky(self, name):
    note(f"try {{name}} {{self.request.retries}}")
    if self.request.retries < 1:
        raise self.retry(countdown=0.2)

@app.task(shared=False)
def total(numbers):
    return sum(numbers)

@app.task(shared=False)
def fan(name):
    for n in range(3):
        add.delay(name, n)
"""


def need_package(name: str) -> None:
    """Skips the test without it, except in CI: it comes with the development dependencies."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a package that it lies in
        found = None
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"the package {name} is missing")
        pytest.skip(f"the package {name} is not installed")


class Shop:
    """A Celery app in a folder, its workers, and what its tasks noted."""

    def __init__(
        self, folder: Path, broker_url: str, options: dict[str, Any], backend: str = "", more: str = ""
    ) -> None:
        """``more``: what the app's module has beside this."""
        self.folder, self.notes_file = folder, folder / "notes"
        self.broker_url = broker_url
        self.notes_file.touch()
        text = APP.format(broker=broker_url, backend=backend, options=options, notes=str(self.notes_file))
        (folder / "shop.py").write_text(textwrap.dedent(text) + textwrap.dedent(more))
        self.workers: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []

    @property
    def app(self) -> Any:
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        import shop  # type: ignore[import-not-found]

        return shop

    def celery(self, *arguments: str, python: str = sys.executable) -> subprocess.Popen[bytes]:
        return self.python("-W", "ignore", "-m", "celery", "-A", "shop", *arguments, python=python)

    def python(self, *arguments: str, python: str = sys.executable) -> subprocess.Popen[bytes]:
        log = self.folder / f"log{len(self.logs)}"
        environment = {**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [python, *arguments],
                cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.workers.append(process)
        self.logs.append(log)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return self.logs[self.workers.index(process)].read_text()

    def ended(self, process: subprocess.Popen[bytes], seconds: float = 60) -> str:
        """Waits for its end, which must be a good one, and returns what it wrote."""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, f"it ended with {code}:\n{self.log(process)}"
        return self.log(process)

    def worker(
        self, *arguments: str, pool: str = "prefork", size: int = 2, python: str = sys.executable
    ) -> subprocess.Popen[bytes]:
        """Starts one and waits until it is ready."""
        name = f"w{len(self.workers)}@shop"
        process = self.celery(
            "worker", "-n", name, "-P", pool, "-c", str(size), "-l", "INFO", *arguments, python=python
        )
        log = self.logs[-1]
        wait_for(
            lambda: f"{name} ready" in log.read_text() or process.poll() is not None,
            60,
            "the worker did not become ready",
        )
        assert process.poll() is None, log.read_text()
        return process

    @property
    def notes(self) -> list[str]:
        return self.notes_file.read_text().split("\n")[:-1]

    def wait_for_note(self, text: str, seconds: float = 30) -> None:
        wait_for(lambda: text in self.notes, seconds, f"{text!r} was not noted")

    def close(self) -> None:
        for process in self.workers:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
