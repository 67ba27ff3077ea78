"""The smoke subsets of Kombu's and Celery's own suites. `make conformance` runs all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.runs import RedisMissing, run
from tests.conformance.suites import SUITES
from tests.conformance.upstream import NEWEST, Environment

pytestmark = [
    pytest.mark.req("C2", "C9"),
    pytest.mark.parametrize("suite", list(SUITES)),
    pytest.mark.timeout(600),  # the first run on a machine installs what it needs
]


def test_the_suites_pass(suite: str, database_url: str, environment: Environment) -> None:
    _run(suite, database_url, environment)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("celery", "kombu"),
    [("5.4.0", "5.4.0"), ("5.5.3", None), ("5.6.3", None), (NEWEST, None)],
    ids=["oldest", "5.5", "5.6", "newest"],
)
def test_they_pass_with_other_versions(
    suite: str, database_url: str, celery: str, kombu: str | None, make_environment: Callable[..., Environment]
) -> None:
    _run(suite, database_url, make_environment(celery, kombu))


def _run(suite: str, database_url: str, environment: Environment) -> None:
    try:
        done = run(SUITES[suite], f"dbqueue+{database_url}", environment, smoke=True, worker="process", limit=240)
    except RedisMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, "\n".join([*done.lines(), done.log[-10_000:]])
