from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.schedules.lab import Lab


@pytest.fixture
def lab(database_url: str) -> Iterator[Lab]:
    """A queue on the test's database, at ten o'clock on a Monday."""
    lab = Lab(database_url)
    yield lab
    lab.close()
