"""What every test can ask for: a real, empty database, and the servers behind it.

- `database_url`: a fresh database. The test runs on SQLite and on PostgreSQL 18, or where the marker
  `@pytest.mark.databases("sqlite", "postgres", "postgres15")` says. `make_database_url` gives more of the same kind,
  and `database` is the name of the kind.
- `postgres`: the server, for tests that stop it or look inside. Such a test runs on PostgreSQL 18 unless marked.
- `make_server(version, **options)`: a server of the test's own.
- `@pytest.mark.req("D13")` names the requirement that a test proves; `pytest --req-report` tells what was proved where.

SQLite is a file, never `:memory:`, and PostgreSQL is PostgreSQL. A missing server skips the test, except that in CI
(the variable CI is set) a missing PostgreSQL 18 fails it: a green run there must not mean that half of it was left out.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import NoReturn

import pytest

from tests.servers import Server, ServerMissing, Servers, find_installation

POSTGRES_VERSIONS = {"postgres": 18, "postgres15": 15}
DATABASES = ("sqlite", *POSTGRES_VERSIONS)
_REQUIREMENT = re.compile(r"([A-Z]+)([0-9]+)([a-z]?)")


def pytest_report_header() -> list[str]:
    found = [f"SQLite {sqlite3.sqlite_version}"]
    for major in POSTGRES_VERSIONS.values():
        found.append(str(find_installation(major) or f"PostgreSQL {major} missing"))
    return [f"databases: {', '.join(found)}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database" not in metafunc.fixturenames:
        return
    names: tuple[str, ...] = ("postgres",) if "postgres" in metafunc.fixturenames else ("sqlite", "postgres")
    marker = metafunc.definition.get_closest_marker("databases")
    if marker is not None:
        names = marker.args
    if unknown := [name for name in names if name not in DATABASES]:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: no such database: {unknown}, only {DATABASES}")
    metafunc.parametrize("database", names, indirect=True)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The session's servers. Most tests want `postgres` or `database_url` instead."""
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """The kind of database this test runs on: sqlite, postgres or postgres15."""
    return str(request.param)


@pytest.fixture
def postgres(database: str, servers: Servers) -> Server:
    """The PostgreSQL server of this test. It is shared: a test may stop it, the next one gets it running."""
    return _running(servers, database)


@pytest.fixture
def make_database_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """A function that makes another empty database and returns its URL."""
    made: list[tuple[Server, str]] = []
    file_names = chain(["queue.db"], (f"queue{number}.db" for number in count(2)))

    def make() -> str:
        if database == "sqlite":
            return f"sqlite:///{tmp_path / next(file_names)}"
        server = _running(request.getfixturevalue("servers"), database)
        name = server.create_database()
        made.append((server, name))
        return server.dsn(name)

    yield make
    for server, name in made:
        if not server.is_running():
            server.start()
        server.drop_database(name)


@pytest.fixture
def database_url(make_database_url: Callable[[], str]) -> str:
    """The URL of a fresh, empty database of this test's own."""
    return make_database_url()


@pytest.fixture
def make_server(servers: Servers) -> Iterator[Callable[..., Server]]:
    """A function that starts a server with settings of its own: `make_server(18, fsync="on")`."""
    made: list[Server] = []

    def make(major: int = POSTGRES_VERSIONS["postgres"], **options: str) -> Server:
        try:
            made.append(servers.make(major, options))
        except ServerMissing as missing:
            _missing(missing, major)
        return made[-1]

    yield make
    for server in made:
        servers.discard(server)


def _running(servers: Servers, database: str) -> Server:
    major = POSTGRES_VERSIONS.get(database)
    if major is None:
        pytest.fail(f"{database} has no server: mark the test with the PostgreSQL databases it runs on")
    try:
        return servers.running(major)
    except ServerMissing as missing:
        _missing(missing, major)


def _missing(missing: ServerMissing, major: int) -> NoReturn:
    # 18 comes with the development dependencies, so only a broken set-up lacks it; 15 is the operating system's affair.
    if os.environ.get("CI") and major == POSTGRES_VERSIONS["postgres"]:
        pytest.fail(str(missing))
    pytest.skip(str(missing))


# -- requirements ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--req-report", action="store_true", help="print which requirements were proved on which database")
    parser.addoption(
        "--update-golden", action="store_true", help="write generated SQL and schemas into their golden files"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("req"):
            if not marker.args or not all(_REQUIREMENT.fullmatch(str(name)) for name in marker.args):
                raise pytest.UsageError(f'{item.nodeid}: a requirement is named like @pytest.mark.req("D13")')
            # Properties travel with the reports, also from the processes of a parallel runner.
            item.user_properties += [("req", name) for name in marker.args]
        callspec = getattr(item, "callspec", None)
        item.user_properties.append(("database", callspec.params.get("database", "any") if callspec else "any"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--req-report"):
        return
    counts: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = getattr(report, "user_properties", [])  # none of a file that could not be collected
            where = dict(properties).get("database", "any")
            for key, name in properties:
                if key == "req":
                    counts[name][where][outcome] += 1
    columns = (*DATABASES, "any")
    terminalreporter.section("requirements proved: passing tests per database")
    terminalreporter.write_line("".join(word.ljust(12) for word in ("", *columns)).rstrip())
    for name in sorted(counts, key=_requirement_order):
        cells = [_cell(counts[name][column]) for column in columns]
        terminalreporter.write_line("".join(word.ljust(12) for word in (name, *cells)).rstrip())


def _cell(outcomes: dict[str, int]) -> str:
    """One failing test unproves a requirement, however many pass beside it; a skipped one proves nothing."""
    if broken := outcomes["failed"] + outcomes["error"]:
        return f"{broken} FAILED"
    return str(outcomes["passed"] or ("skipped" if outcomes["skipped"] else ""))


def _requirement_order(name: str) -> tuple[str, int, str]:
    match = _REQUIREMENT.fullmatch(name)
    assert match is not None
    return match[1], int(match[2]), match[3]
