"""An example as its users run it: the web server, Celery's workers and beat, each a process of its own on one database."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from dbqueue import DBQueue, JobRecord
from tests.examples.commands import ROOT, Processes
from tests.waiting import wait_for


@dataclass(frozen=True)
class Example:
    """How one of the examples is started."""

    folder: Path
    app: str
    """What `celery -A` gets."""
    web: tuple[str, ...]
    """The web server's command, without its port."""
    tasks: str
    """The module of the tasks."""
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands that make the tables."""
    form: bool = False
    """Whether an order is posted as a form rather than as JSON."""


class Lab(Processes):
    def __init__(self, example: Example, url: str, scratch: Path) -> None:
        super().__init__(scratch)
        self.example, self.scratch, self.url = example, scratch, url
        self.queue = DBQueue(url)
        self.environment = {**os.environ, "SHOP_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
        self.environment.pop("CELERY_BROKER_URL", None)  # it would win over the app's own
        self._port = 0

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, *command: str, **settings: object) -> subprocess.Popen[bytes]:
        """``settings`` are the example's own: ``lease=2`` is SHOP_LEASE."""
        environment = self.environment | {f"SHOP_{name.upper()}": str(value) for name, value in settings.items()}
        return self._begin([sys.executable, *command], self.example.folder, environment)

    def run(self, *command: str, **settings: object) -> str:
        process = self.start(*command, **settings)
        code = process.wait(60)
        assert code == 0, self.log(process)
        return self.log(process)

    def prepare(self) -> None:
        for command in self.example.prepare:
            self.run(*command)

    def web(self, **settings: object) -> subprocess.Popen[bytes]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        process = self.start(*(word.format(port=self._port) for word in self.example.web), **settings)

        def answers() -> bool:
            assert process.poll() is None, self.log(process)
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self._port)) == 0

        wait_for(answers, 60, "the web server does not listen")
        return process

    def celery(self, *arguments: str, **settings: object) -> subprocess.Popen[bytes]:
        return self.start("-m", "celery", "-A", self.example.app, *arguments, **settings)

    def worker(self, pool: str = "prefork", **settings: object) -> subprocess.Popen[bytes]:
        return self.until(self.celery("worker", "-P", pool, "-c", "2", "-l", "INFO", **settings), " ready.")

    def own_worker(self, **settings: object) -> subprocess.Popen[bytes]:
        """`dbqueue worker` on the same app."""
        return self.until(
            self.start("-m", "dbqueue", "worker", "-A", self.example.app, "-c", "2", **settings), " 2 slots"
        )

    def close(self) -> None:
        super().close()
        self.queue.close()

    # -- the shop ----------------------------------------------------------------------------------------------------

    def order(self, card: str = "accepted") -> tuple[int, dict[str, Any]]:
        fields = {"customer": "Ann", "cents": 4200, "card": card}
        if self.example.form:
            return self._ask("/orders", urlencode(fields).encode(), "application/x-www-form-urlencoded")
        return self._ask("/orders", json.dumps(fields).encode(), "application/json")

    def events(self, number: int) -> list[str]:
        status, answer = self._ask(f"/orders/{number}")
        assert status == 200
        return list(answer["events"])

    def wait_for_events(self, number: int, *wanted: str) -> list[str]:
        wait_for(lambda: set(wanted) <= set(self.events(number)), 60, f"not all of {wanted}")
        return self.events(number)

    def _ask(self, path: str, body: bytes | None = None, kind: str = "text/plain") -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", body, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    # -- what the database says ----------------------------------------------------------------------------------------

    def messages(self, task: str | None = None) -> list[JobRecord]:
        found = self.queue.jobs(queue="celery", limit=1_000)
        return [record for record in found if task is None or record.target.endswith(f".{task}")]

    def state_of(self, task: str) -> str:
        (record,) = self.messages(task)
        return record.state

    def counts(self) -> Mapping[str, int]:
        return self.queue.counts("celery")
