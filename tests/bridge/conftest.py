from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import celery_bridge.bridge
from celery_bridge import Bridge
from dbqueue import DBQueue
from tests.bridge.lab import Lab
from tests.runtimes.conftest import make_queue as make_queue
from tests.runtimes.conftest import queue as queue
from tests.runtimes.conftest import start as start
from tests.runtimes.lab import Process


@pytest.fixture(autouse=True)
def no_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared tasks and bridges are the process's; each test begins without any."""
    monkeypatch.setattr(celery_bridge.bridge, "_shared", celery_bridge.bridge._Shared())


@pytest.fixture
def bridge(queue: DBQueue) -> Bridge:
    return Bridge(queue)


@pytest.fixture
def lab(
    database_url: str, tmp_path: Path, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    """The tasks of `tasks.py` on the test's database, and workers for them that cannot import Celery."""
    lab = Lab(database_url, tmp_path, start, monkeypatch)
    yield lab
    lab.queue.close()
