"""The pytest plugin: one fixture. It is active wherever celery-dbqueue is installed, so nothing is loaded before a test
asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dbqueue.testing import CaseFactory


@pytest.fixture
def dbqueue_case(tmp_path: Path) -> Iterator[CaseFactory]:
    """``case = dbqueue_case(queue)``: the queue has a database of this test's own until the test ends. Call it for each
    queue."""
    from dbqueue import testing

    with ExitStack() as cases:
        yield lambda queue: cases.enter_context(testing.case(queue, tmp_path))
