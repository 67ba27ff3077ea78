"""A Celery app on a fresh database, run by real processes of ``dbqueue worker -A``. Most tests share one worker for each kind of
database: `project`. `make_project` gives one of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.bridge_worker.projects import Project
from tests.servers import ServerMissing, Servers


@pytest.fixture(scope="session")
def _shared(servers: Servers) -> Iterator[dict[str, Project]]:
    shared: dict[str, Project] = {}
    yield shared
    for project in shared.values():
        project.close()


@pytest.fixture
def project(
    database: str, servers: Servers, _shared: dict[str, Project], tmp_path_factory: pytest.TempPathFactory
) -> Project:
    if database not in _shared:
        folder = tmp_path_factory.mktemp(f"proj-{database}")
        url = f"sqlite:///{folder / 'queue.db'}"
        if database == "postgres":
            try:
                server = servers.running(18)
            except ServerMissing as missing:
                pytest.skip(str(missing))
            url = server.dsn(server.create_database())
        made = Project(folder, f"dbqueue+{url}", worker_concurrency=2)
        _shared[database] = made  # before it starts a worker: what was started is ended
        made.worker("-Q", "proj,side")
    return _shared[database]


@pytest.fixture
def make_project(database_url: str, tmp_path: Any) -> Iterator[Callable[..., Project]]:
    made: list[Project] = []

    def make(broker_url: str | None = None, **options: Any) -> Project:
        made.append(Project(tmp_path / f"proj{len(made)}", broker_url or f"dbqueue+{database_url}", **options))
        return made[-1]

    yield make
    for project in made:
        project.close()
