"""Commands as somebody types them into a shell: each a process of its own in one folder, with its output kept."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
READY = ("ready.", " slots, lease ", "beat: Starting", " owns the entries ")
"""One of them is in the log of a worker or beat that works."""


class Processes:
    """Real processes, each with a process group and a log of its own."""

    def __init__(self, logs: Path) -> None:
        self._folder = logs
        self._logs: dict[subprocess.Popen[bytes], Path] = {}

    def _begin(self, command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        log = self._folder / f"log{len(self._logs)}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._logs[process] = log
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return self._logs[process].read_text(errors="replace")

    def until(self, process: subprocess.Popen[bytes], *words: str) -> subprocess.Popen[bytes]:
        """Waits until one of the words is in its log."""

        def ready() -> bool:
            assert process.poll() is None, self.log(process)
            return any(word in self.log(process) for word in words)

        wait_for(ready, 60, "the worker is not ready")
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, self.log(process)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """With its children, as the kernel or a machine's end does it: nothing is said good-bye to."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self._logs:
            if process.poll() is None:
                self.kill(process)


class Commands(Processes):
    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__(folder)
        self.folder = folder
        given = {name: value for name, value in os.environ.items() if not name.startswith(("CELERY_", "SHOP_"))}
        path = f"{folder}{os.pathsep}{ROOT}"
        self.environment = {**given, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **environment}

    def start(self, command: str, **environment: str) -> subprocess.Popen[bytes]:
        """`celery`, `dbqueue` and `python` are those of the tests; everything else is looked for on the path."""
        program, *arguments = shlex.split(command)
        if program in ("celery", "dbqueue"):
            arguments = ["-m", program, *arguments]
        if program in ("celery", "dbqueue", "python"):
            program = sys.executable
        return self._begin([program, *arguments], self.folder, self.environment | environment)

    def run(self, command: str, code: int = 0) -> str:
        """What it wrote, once it has ended."""
        process = self.start(command)
        assert process.wait(60) == code, f"{command}: {process.returncode}, not {code}\n{self.log(process)}"
        return self.log(process)

    def serve(self, command: str, **environment: str) -> subprocess.Popen[bytes]:
        """A worker or beat, once it works."""
        return self.wait_for_it(self.start(command, **environment))

    def wait_for_it(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        return self.until(process, *READY)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As above; one that has ended is left alone."""
        if process.poll() is None:
            super().kill(process)
