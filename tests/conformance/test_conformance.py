"""The smoke subsets of Kombu's and Celery's own suites. `make conformance` runs all of them."""

from __future__ import annotations

import os

import pytest

from tests.conformance import upstream
from tests.conformance.runs import RedisMissing, run
from tests.conformance.suites import SUITES

pytestmark = [
    pytest.mark.req("C2"),
    pytest.mark.parametrize("suite", list(SUITES)),
    pytest.mark.timeout(600),  # the first run on a machine installs what it needs
]


def test_the_suites_pass(suite: str, database_url: str) -> None:
    _run(suite, database_url, None, None)


@pytest.mark.soak
@pytest.mark.parametrize(("celery", "kombu"), [("5.4.0", "5.4.0"), (upstream.NEWEST, None)], ids=["oldest", "newest"])
def test_they_pass_with_other_versions(suite: str, database_url: str, celery: str, kombu: str | None) -> None:
    _run(suite, database_url, celery, kombu)


def _run(suite: str, database_url: str, celery: str | None, kombu: str | None) -> None:
    try:
        environment = upstream.environment(celery, kombu)
        done = run(SUITES[suite], f"dbqueue+{database_url}", environment, smoke=True, worker="process", limit=240)
    except upstream.IndexUnreachable as unreachable:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"PyPI cannot be reached: {unreachable}")
    except RedisMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, "\n".join([*done.lines(), done.log[-10_000:]])
