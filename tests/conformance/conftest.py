"""The environment that all of these tests share; the first run on a machine makes it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.conformance import upstream
from tests.conformance.suites import SUITES


@pytest.fixture(scope="session")
def make_environment() -> Callable[..., upstream.Environment]:
    """A function that returns the environment with these versions, suites included. Without PyPI the test is skipped, or fails in CI."""

    def make(celery: str | None = None, kombu: str | None = None) -> upstream.Environment:
        try:
            environment = upstream.environment(celery, kombu)
            for suite in SUITES:
                environment.suite(suite)
            return environment
        except upstream.IndexUnreachable as unreachable:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"PyPI cannot be reached: {unreachable}")

    return make


@pytest.fixture(scope="session")
def environment(make_environment: Callable[..., upstream.Environment]) -> upstream.Environment:
    return make_environment()
