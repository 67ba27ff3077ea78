"""The app of ``proj.py`` in a folder of its own, its real workers, and what its tasks noted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from dbqueue import DBQueue
from dbqueue.views import JobRecord
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
APP = Path(__file__).with_name("proj.py").read_text()
NAME = "w@proj"


class Project:
    """``broker_url``: of the workers; ``client_url``: of this process, if it goes another way. ``conf``: the app's settings.
    ``more``: what the module has beside the tasks of all tests."""

    def __init__(
        self, folder: Path, broker_url: str, *, results: str | None = "same", client_url: str | None = None, more: str = "",
        kills: bool = False, **conf: Any,
    ) -> None:  # fmt: skip
        self.folder, self.notes_file = folder, folder / "notes"
        self.broker_url = broker_url
        self.conf, self.kills = conf, kills
        self.results = broker_url if results == "same" else results
        folder.mkdir(exist_ok=True)
        self.notes_file.touch()
        self.write(more)
        self.workers: list[subprocess.Popen[bytes]] = []
        client = client_url or broker_url
        self.queue = DBQueue(client.removeprefix("dbqueue+"))
        self.queue.migrate()
        self.app = Celery("proj", broker=client, backend=client if results == "same" else results, set_as_current=False)
        self.app.conf.update(task_default_queue="proj", **conf)

    def write(self, more: str) -> None:
        """The module, as the next worker sees it."""
        settings = {
            "BROKER": self.broker_url,
            "RESULTS": self.results,
            "NOTES": str(self.notes_file),
            "CONF": self.conf,
            "KILLS": self.kills,
        }
        (self.folder / "proj_settings.py").write_text(
            "".join(f"{name} = {value!r}\n" for name, value in settings.items())
        )
        (self.folder / "proj.py").write_text(APP + more)

    # -- sending -----------------------------------------------------------------------------------------------------

    def s(self, task: str, *args: Any, **kwargs: Any) -> Any:
        """A signature of one of its tasks."""
        return self.app.signature(f"proj.{task}", args=args, kwargs=kwargs)

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult:
        return self.s(task, *args).apply_async(**options)

    def raw(self, body: bytes, **options: Any) -> None:
        """A message as it is, as any program may put one in."""
        with self.app.connection_for_write() as connection:
            options = {"content_type": "application/json", "content_encoding": "utf-8"} | options
            connection.Producer(connection.default_channel).publish(body, routing_key="proj", **options)

    def value(self, task: str, *args: Any, **options: Any) -> Any:
        return self.send(task, *args, **options).get(timeout=30)

    def result(self, task_id: str) -> AsyncResult:
        """Of its own, without the parents whose errors would be raised first."""
        return AsyncResult(task_id, app=self.app)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def rows(self, task_id: str) -> list[JobRecord]:
        """Of the task's messages, the notices that it was revoked not included."""
        return [job for job in self.queue.jobs(limit=1_000) if job.task_id == task_id]

    def ended(self, task_id: str, rows: int = 1) -> list[JobRecord]:
        """The rows of a task once none of them waits or runs, in their order."""

        def done() -> list[JobRecord] | None:
            found = self.rows(task_id)
            return (
                found if len(found) >= rows and all(job.state not in ("pending", "running") for job in found) else None
            )

        return sorted(wait_for(done, 30, f"{task_id} did not end") or [], key=lambda job: job.id)

    def idle(self, seconds: float = 60) -> None:
        """Until nothing waits or runs."""
        wait_for(
            lambda: not any(self.queue.counts().get(state) for state in ("pending", "running")),
            seconds,
            "it is not idle",
        )

    @property
    def notes(self) -> list[str]:
        return self.notes_file.read_text().split("\n")[:-1]

    def wait_for_note(self, text: str, seconds: float = 30) -> None:
        wait_for(lambda: text in self.notes, seconds, f"{text!r} was not noted")

    # -- workers -----------------------------------------------------------------------------------------------------

    def worker(self, *arguments: str, size: int = 2, skew: float = 0.0) -> subprocess.Popen[bytes]:
        """Starts ``dbqueue worker`` and waits until it works. ``skew``: seconds by which its wall clock is wrong."""
        name = ("-n", NAME) if "-n" not in arguments else ()
        command = ("tests.runtimes.skewed", str(skew)) if skew else ("dbqueue",)
        process = self.start(*command, "worker", "-A", "proj", "-c", str(size), *name, *arguments)
        self._until(process, " slots, lease ")
        return process

    def celery_worker(self, *arguments: str, size: int = 2) -> subprocess.Popen[bytes]:
        process = self.start(
            "celery", "-A", "proj", "worker", "-n", "c@proj", "-c", str(size), "-l", "INFO", *arguments
        )
        self._until(process, "c@proj ready")
        return process

    def _until(self, process: subprocess.Popen[bytes], text: str) -> None:
        wait_for(lambda: text in self.log(process) or process.poll() is not None, 60, "the worker did not start")
        assert process.poll() is None, self.log(process)

    def start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"log{len(self.workers)}"
        environment = {**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", module, *arguments],
                cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.workers.append(process)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"log{self.workers.index(process)}").read_text()

    def stop(self, process: subprocess.Popen[bytes]) -> str:
        """As a service manager does; returns its log."""
        process.terminate()
        code = process.wait(30)
        assert code == 0, f"it ended with {code}:\n{self.log(process)}"
        return self.log(process)

    def close(self) -> None:
        for process in self.workers:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.workers:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.app.close()
        self.queue.close()
