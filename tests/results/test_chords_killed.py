"""A worker that is killed while the last part of a chord returns: there is a body once, or its failure, never neither, never two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dbqueue import DBQueue
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import queue as queue

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.req("C9", "D12"), pytest.mark.timeout(300)]


def check(url: str, scenario: str, which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.results.dying", url, scenario, which],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    whole, *killed = map(json.loads, done.stdout.splitlines())
    assert len(killed) == (whole["statements"] if which == "all" else 2)
    assert {each["statements"] for each in killed} == {None}, "each was killed"
    for each in (whole, *killed):
        if scenario == "returns":
            assert each["after"] == {"bodies": 1, "state": "PENDING"}, (whole, killed)
        else:
            assert each["after"] == {"bodies": 0, "state": "FAILURE"}, (whole, killed)
    assert [each["between"]["bodies"] for each in killed] == [0] * len(killed), "what was not committed is not there"


@pytest.mark.parametrize("scenario", ["returns", "chain"])
def test_a_worker_killed_before_its_commit(broker_url: str, queue: DBQueue, scenario: str) -> None:
    check(broker_url, scenario, "some")


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("scenario", ["returns", "fails", "chain"])
def test_a_worker_killed_between_any_two_statements(broker_url: str, queue: DBQueue, scenario: str) -> None:
    check(broker_url, scenario, "all")
