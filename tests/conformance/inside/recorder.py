"""What is loaded into upstream's pytest, in an environment that has neither dbqueue's tests nor their plugins.

The plan, a JSON file, says which tests to leave out or to run; each result is written down at once, one JSON line, so that a run
that is killed leaves what it knew. The text of a suite is never changed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

PLAN: dict[str, Any] = json.loads(Path(os.environ["CONFORMANCE_PLAN"]).read_text())


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("env(name)", "flaky(**options)", "timeout(seconds)"):
        config.addinivalue_line("markers", marker)


def pytest_sessionstart() -> None:
    if PLAN["suite"] == "celery":
        _hurry_between_tests()
        if PLAN["worker"] in _COMMANDS:
            from celery.contrib.testing import worker

            worker.start_worker = _start_worker_process


class OwnResults(str):
    """The URL of our result backend, which says that it begins with ``redis://``.

    A third of Celery's tests skip themselves unless the results are in Redis. They want it only for the notes that their tasks take
    there, which is not asked of the backend: with Redis running, and this answer, they run on ours.
    """

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return "redis://".startswith(prefix, *bounds) or super().startswith(prefix, *bounds)


def pytest_plugin_registered(plugin: object) -> None:
    if PLAN["own_results"] and getattr(plugin, "__name__", "") == "t.integration.conftest":
        plugin.TEST_BACKEND = OwnResults(plugin.TEST_BACKEND)  # type: ignore[attr-defined]


def _hurry_between_tests() -> None:
    """After each test the suite asks whether the worker is idle, and waits a second or two for the answers of others. There are none."""
    from celery.contrib.testing.manager import Manager

    original = Manager.wait_until_idle

    def wait_until_idle(self: Any) -> None:
        control = self.app.control
        patient = control.inspect
        control.inspect = functools.partial(patient, limit=1)
        try:
            original(self)
        finally:
            control.inspect = patient

    Manager.wait_until_idle = wait_until_idle


_COMMANDS = {
    "process": ("celery", "-A", "worker_app", "worker"),
    "dbqueue": ("dbqueue", "worker", "-A", "worker_app"),
}


@contextlib.contextmanager
def _start_worker_process(app: Any, **_: Any) -> Iterator[None]:
    """A worker as it is deployed, in place of the thread that the suite starts, under the name that the suite expects."""
    from celery.contrib.testing.tasks import ping
    from celery.result import allow_join_result
    from celery.utils.nodenames import anon_nodename

    command = [sys.executable, "-m", *_COMMANDS[PLAN["worker"]], "-n", anon_nodename(), "-c", "1", "-l", "INFO"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        with allow_join_result():
            assert ping.delay().get(timeout=30) == "pong"
        yield
    finally:
        process.terminate()
        try:
            code = process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert code == 0, f"the worker ended with {code} after SIGTERM"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, dropped = [], []
    for item in items:
        name = _name(item.nodeid)
        reason = next((why for pattern, why in PLAN["left_out"].items() if _matches(name, [pattern])), None)
        if not _matches(name, PLAN["only"]):
            dropped.append(item)
        elif reason is not None:
            dropped.append(item)
            _write(name, "left out", why=reason)
        else:
            kept.append(item)
            _write(name, "planned")
            seconds = PLAN["slow"] if _matches(name, PLAN["slow_tests"]) else PLAN["timeout"]
            item.add_marker(pytest.mark.timeout(seconds), append=False)  # before upstream's own, so this one counts
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


@pytest.fixture(autouse=True)
def _worker_is_up(request: pytest.FixtureRequest) -> None:
    """Some of Celery's tests count on an earlier one having started the worker, which is not so when a few are chosen."""
    if request.node.path.name in PLAN["worker_files"]:
        request.getfixturevalue("celery_session_worker")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(_name(report.nodeid), "failed", why=str(report.longrepr)[-3000:])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "expected failure" if report.skipped else "passed"
    if outcome == "passed" and _is_part(report):
        return
    if outcome == "passed" and report.when != "call":
        outcome = ""  # the time counts
    why = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        why = report.longrepr[2].removeprefix("Skipped: ")
    elif outcome not in ("passed", ""):
        why = str(report.longrepr)[-3000:]
    _write(_name(report.nodeid), outcome, why=why, seconds=round(report.duration, 2))


def _is_part(report: pytest.TestReport) -> bool:
    """A subtest: the test that it belongs to has a report of its own."""
    return type(report).__name__ != "TestReport"


def _name(nodeid: str) -> str:
    """As in the table: `test_tasks.py::test_tasks::test_fail`, or only class and name for Kombu's."""
    return nodeid.removeprefix("t/integration/").lstrip(":")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Brackets are the parameters of a test, not a set of characters."""
    return any(fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


def _write(name: str, outcome: str, why: str = "", seconds: float = 0.0) -> None:
    with Path(PLAN["results"]).open("a") as results:
        results.write(json.dumps({"name": name, "outcome": outcome, "why": why, "seconds": seconds}) + "\n")
