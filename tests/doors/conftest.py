"""What the tests of the command line share: a queue with a job in every state, and two ways to run a command.

`cli(...)` runs it in this process under click's test runner, which is quick; `process(...)` runs it as a user does.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import pytest
from click.testing import CliRunner

from dbqueue import DBQueue
from dbqueue.cli.program import program
from dbqueue.states import State
from tests.factory import make
from tests.golden import golden as golden

ROOT = Path(__file__).parents[2]


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The error as JSON: the last line of stderr."""
        return json.loads(self.err.splitlines()[-1])


class Run(Protocol):
    def __call__(self, *args: object, stdin: str = "") -> Answer: ...


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory, no DBQUEUE_* variable of the developer, and no module of an earlier test."""
    monkeypatch.chdir(tmp_path)
    for variable in os.environ:
        if variable.startswith("DBQUEUE_"):
            monkeypatch.delenv(variable)
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("shop", "shop_mail", "inner"):
            del sys.modules[name]


@pytest.fixture
def cli() -> Run:
    old: dict[str, Any] = (
        {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    )  # click 8.1

    def run(*args: object, stdin: str = "") -> Answer:
        result = CliRunner(**old).invoke(program, [str(arg) for arg in args], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def process(tmp_path: Path) -> Run:
    def run(*args: object, stdin: str = "") -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "dbqueue", *map(str, args)],
            input=stdin, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def queue(database_url: str) -> Iterator[DBQueue]:
    queue = DBQueue(database_url)
    queue.migrate()
    yield queue
    queue.close()


@pytest.fixture
def jobs(queue: DBQueue) -> dict[str, UUID]:
    """One job in every state, each in a queue, with a target and a key of the state's name."""
    made = {}
    for state in State:
        name = state.label
        more = {"payload": None} if state is State.SUCCEEDED else {}
        columns = {"queue": name, "target": f"shop.jobs.{name}", "key": f"k:{name}", "timeout_ms": 30_000, **more}
        made[name] = UUID(bytes=make(queue.database, state, **columns).id)
    return made
