"""The runner itself: what it is for is to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import upstream
from tests.conformance.__main__ import main
from tests.conformance.runs import run
from tests.conformance.suites import KOMBU
from tests.conformance.upstream import Environment

pytestmark = [pytest.mark.req("C2"), pytest.mark.timeout(600)]

NOBODY = "dbqueue+postgresql://nobody@127.0.0.1:1/nothing"


def test_a_broker_that_fails_a_test_fails_the_run(environment: Environment, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    arguments = ["kombu", "--database", NOBODY, "-k", "TestMessage::test_ack", "--report", str(report)]
    assert main(arguments) == 1
    lines = report.read_text().splitlines()
    assert lines[0] == str(environment)
    assert lines[1].startswith(f"== kombu {environment.kombu} on postgresql: 0 of 1 passed")
    assert lines[2].startswith("FAILED TestMessage::test_ack")


def test_nothing_run_is_no_success(environment: Environment) -> None:
    assert not run(KOMBU, NOBODY, environment, only="no such test").ok


@pytest.mark.databases("sqlite")
def test_a_run_that_takes_too_long_is_ended_and_has_failed(environment: Environment, database_url: str) -> None:
    done = run(
        KOMBU, f"dbqueue+{database_url}", environment, only="TestTimeToLive", limit=4
    )  # they wait for twelve seconds
    assert done.ended == "ended after 4 s"
    assert done.seconds < 12
    assert not done.ok


def test_every_test_that_is_left_out_is_reported_with_its_reason(environment: Environment, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    main(["kombu", "--database", NOBODY, "-k", "test_failover_switches_to_alternate_url", "--report", str(report)])
    (reason,) = KOMBU.left_out.values()
    assert f"left out, 1: {reason}" in report.read_text()


def test_without_an_index_and_with_nothing_there_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(upstream.IndexUnreachable, match="pip install"):
        upstream.environment("5.4.0", "5.4.0")
