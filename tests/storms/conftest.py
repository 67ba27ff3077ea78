from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue
from tests.storms.storm import Storm


@pytest.fixture
def make_storm(database_url: str, tmp_path: Path) -> Iterator[Callable[..., Storm]]:
    """Makes a storm on the test's database; ``url`` is another way to it, for the workers."""
    with ExitStack() as stack:

        def make(url: str = database_url, *, lease: float = 1, **options: Any) -> Storm:
            queue = stack.enter_context(closing(DBQueue(database_url, lease=lease)))
            storm = Storm(queue, url, tmp_path, lease=lease, **options)
            stack.callback(storm.stop)
            return storm

        yield make
