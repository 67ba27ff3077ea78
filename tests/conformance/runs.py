"""Running one suite on one broker URL, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from tests.conformance.suites import Suite
from tests.conformance.upstream import Environment
from tests.waiting import wait_for

_INSIDE = Path(__file__).with_name("inside")
_INI = """[pytest]
python_classes = Test* test_*
timeout_method = signal
xfail_strict = true
"""
_TIMEOUT, _SLOW = 60, 300
"""Seconds for one test: most of them; those that try out dozens of combinations."""
_STOP_S = 15.0


class RedisMissing(Exception):
    """This machine has no redis-server."""


@dataclass
class Result:
    outcome: str
    """planned (it was not reached), passed, failed, skipped, expected failure or left out."""
    why: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    title: str
    results: dict[str, Result] = field(default_factory=dict)
    seconds: float = 0.0
    ended: str = ""
    """Why the run as a whole is no good; empty if it came to its end."""
    log: str = ""

    @property
    def failures(self) -> dict[str, Result]:
        return {name: result for name, result in self.results.items() if result.outcome in ("failed", "planned")}

    @property
    def ok(self) -> bool:
        return not self.ended and not self.failures and self.count("passed") > 0

    def count(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results.values())

    def summary(self) -> str:
        judged = self.count("passed") + len(self.failures)
        parts = [f"{self.title}: {self.count('passed')} of {judged} passed"]
        parts += [
            f"{count} {word}" for word in ("skipped", "expected failure", "left out") if (count := self.count(word))
        ]
        return f"{', '.join(parts)}, {self.seconds:.0f} s{' -- ' + self.ended if self.ended else ''}"

    def lines(self) -> Iterator[str]:
        """The report: every test, the failures first and with their reasons, then the reasons for what was not run."""
        yield f"== {self.summary()}"
        for name, result in self.failures.items():
            yield f"FAILED {name} ({result.seconds:g} s)"
            text = result.why or "it was not reached"
            yield from (f"    {line}" for line in text.rstrip().splitlines()[-40:])
        for outcome in ("left out", "skipped", "expected failure"):
            reasons = Counter(result.why.strip() for result in self.results.values() if result.outcome == outcome)
            for reason, count in reasons.most_common():
                yield f"{outcome}, {count}: {reason.splitlines()[-1] if reason else 'no reason given'}"
                yield from (
                    f"    {name}"
                    for name, result in self.results.items()
                    if result.outcome == outcome and result.why.strip() == reason
                )
        for name, result in self.results.items():
            if result.outcome == "passed":
                yield f"passed {name} ({result.seconds:g} s)"


def run(
    suite: Suite,
    broker: str,
    environment: Environment,
    *,
    smoke: bool = False,
    only: str | None = None,
    worker: str = "thread",
    results: str = "dbqueue",
    limit: float = 3600.0,
    show: bool = False,
) -> Run:
    """Run a suite, or its smoke subset, or the tests that match `only`, on the broker's URL (`dbqueue+postgresql://...`).

    `worker`: Celery's suite starts one in a `thread` of its own, and some of its tests reach into it; as a `process` it is the
    command that is deployed, and as `dbqueue` it is our own. `results`: of its tasks are kept in the broker's database, `dbqueue`, or
    in `redis`. `limit`: seconds for the whole run. `show`: upstream's progress goes to the terminal; otherwise it is kept as
    `Run.log`. Raises IndexUnreachable and RedisMissing.
    """
    home = environment.suite(suite.name)
    left_out = dict(suite.left_out)
    database = urlsplit(broker).scheme.removeprefix("dbqueue+")
    own_results = suite.needs_redis and results == "dbqueue"
    if worker != "thread":
        left_out.update(suite.left_out_of_process)
    if worker == "dbqueue":
        left_out.update(suite.left_out_of_dbqueue)
    if own_results:
        left_out.update(suite.left_out_of_own_results)
    version = getattr(environment, suite.name)
    title = f"{suite.name} {version} on {database}"
    if smoke:
        title += ", smoke"
    if worker != "thread" and suite.name == "celery":
        title += ", worker process" if worker == "process" else ", dbqueue worker"
    if suite.needs_redis and not own_results:
        title += ", results in Redis"
    result = Run(title)
    with tempfile.TemporaryDirectory(prefix="dbqueue-conformance-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        patterns = [f"*{only}*"] if only else list(suite.smoke) if smoke else ["*"]
        plan = {
            "suite": suite.name,
            "broker": broker,
            "dead_broker": _dead(broker, folder),
            "left_out": left_out,
            "only": patterns,
            "results": str(folder / "results"),
            "timeout": _TIMEOUT,
            "slow": _SLOW,
            "slow_tests": suite.slow_tests,
            "worker_files": suite.worker_files,
            "worker": worker,
            "own_results": own_results,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "pytest.ini").write_text(_INI)
        (folder / "results").touch()
        settings = {
            "CONFORMANCE_PLAN": str(folder / "plan.json"),
            "PYTHONPATH": os.pathsep.join([str(_INSIDE), str(home)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": os.pathsep.join([str(environment.python.parent), os.environ["PATH"]]),
            "TEST_BROKER": broker,
            "WORKER_LOGLEVEL": "INFO",  # two of Celery's tests read the worker's log
        }
        if suite.needs_redis:
            port = stack.enter_context(_redis(folder))
            settings.update(REDIS_HOST="127.0.0.1", REDIS_PORT=str(port))
            settings["TEST_BACKEND"] = broker if own_results else f"redis://127.0.0.1:{port}/0"
        command: list[str | Path] = [environment.python, "-m", "pytest", "-c", folder / "pytest.ini", "--rootdir", home]
        command += ["-q", "--no-header", "--tb=short", "-p", "recorder", "-p", "no:cacheprovider", "-p", "no:dbqueue"]
        whole_files = {
            file: why for file, why in _whole_files(suite).items() if (home / "t" / "integration" / file).exists()
        }
        command += _targets(suite, whole_files)
        began = time.monotonic()
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=home,
                env={**_clean_environment(), **settings},
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=None if show else subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                result.ended = f"ended after {limit:g} s"
            finally:
                _stop(process)
        result.seconds = time.monotonic() - began
        _read(folder / "results", result)
        if patterns == ["*"]:
            result.results.update({file: Result("left out", why) for file, why in whole_files.items()})
        result.log = log.read_text(errors="replace")
        if not result.ended and process.returncode not in (0, 1):
            result.ended = f"pytest ended with {process.returncode}"
    return result


def _whole_files(suite: Suite) -> dict[str, str]:
    """Files of which every test is left out. They are not even imported: they may need libraries that are not here."""
    return {pattern.removesuffix("*"): why for pattern, why in suite.left_out.items() if pattern.endswith(".py*")}


def _targets(suite: Suite, without: Iterable[str]) -> list[str | Path]:
    if suite.name == "kombu":
        return [_INSIDE / "kombu_classes.py"]
    return ["-p", "celery.contrib.pytest", "t/integration", *(f"--ignore=t/integration/{file}" for file in without)]


def _dead(broker: str, folder: Path) -> str:
    """The same kind of URL with nothing behind it."""
    parts = urlsplit(broker)
    if not parts.hostname:
        return f"{parts.scheme}:///{folder}/missing/queue.db"
    credentials, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{_free_port()}"))


def _clean_environment() -> dict[str, str]:
    """Without what would change pytest, Celery or dbqueue."""
    hidden = re.compile(r"PYTEST|PYTHON|CELERY|DBQUEUE|KOMBU|TEST_|PG|COV|VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not hidden.match(name)}


def _read(path: Path, run: Run) -> None:
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        known = run.results.setdefault(entry["name"], Result("planned"))
        known.seconds = round(known.seconds + entry["seconds"], 2)
        if entry["outcome"] and known.outcome != "failed":  # by a part of it, or before its fixtures were taken down
            known.outcome, known.why = entry["outcome"], entry["why"]


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[int]:
    """A server of our own for the notes that tasks take; the port."""
    program = shutil.which("redis-server")
    if program is None:
        raise RedisMissing("redis-server is not installed: the tasks of Celery's suite take notes there")
    port = _free_port()
    command: Sequence[str | Path] = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder]
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for(lambda: _answers(port, server), 10, "redis-server did not start")
        yield port
    finally:
        server.terminate()
        server.wait(_STOP_S)


def _answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "redis-server ended at once"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End pytest if it has not ended, and whatever it left behind: pool processes of a worker that hangs."""
    for number, seconds in ((signal.SIGINT, _STOP_S), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
