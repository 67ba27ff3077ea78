"""What the other tests stand on: databases are fresh, servers come back, nothing outlives a killed session."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.servers import Server
from tests.waiting import wait_for


@pytest.mark.databases("sqlite", "postgres", "postgres15")
@pytest.mark.parametrize("visit", [1, 2])
def test_a_database_is_empty_and_shared_with_no_other_test(
    database_url: str, make_database_url: Callable[[], str], visit: int
) -> None:
    for url in (database_url, make_database_url()):
        if url.startswith("sqlite"):
            connection: sqlite3.Connection | psycopg.Connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        else:
            connection = psycopg.connect(url)
        connection.execute("CREATE TABLE visited (visit integer)")
        connection.commit()
        connection.close()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restarted_server_keeps_its_address_and_what_was_committed(
    postgres: Server, database_url: str, mode: str
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE kept ()")
    postgres.restart(mode)
    with psycopg.connect(database_url) as connection:
        connection.execute("SELECT FROM kept")


def test_a_stopped_server_is_running_again(postgres: Server, make_database_url: Callable[[], str]) -> None:
    postgres.stop()
    psycopg.connect(make_database_url()).close()


def test_terminated_connections_are_gone(postgres: Server, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        assert postgres.terminate_connections(connection.info.dbname) == 1
        with pytest.raises(psycopg.errors.AdminShutdown):
            connection.execute("SELECT 1")


def test_a_server_of_ones_own_has_its_own_settings(make_server: Callable[..., Server]) -> None:
    assert make_server(18, fsync="on").execute("SHOW fsync") == [("on",)]


_SESSION = """
import json, time
from tests.servers import Servers
server = Servers().make(18)
print(json.dumps([str(server.home), server.port]), flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("postgres")  # skips where there is none
def test_kill_9_of_the_session_leaves_neither_server_nor_files() -> None:
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", _SESSION], stdout=subprocess.PIPE, cwd=root) as session:
        assert session.stdout is not None
        home, port = json.loads(session.stdout.readline())
        assert Path(home).exists()
        os.kill(session.pid, signal.SIGKILL)
    wait_for(lambda: not Path(home).parent.exists(), message=f"{home} is still there")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_waiting_ends_with_what_was_seen_last() -> None:
    seen = iter([0, 0, "there"])
    assert wait_for(lambda: next(seen)) == "there"
    with pytest.raises(AssertionError, match=r"no luck \(waited 0.01 s, last saw 0\)"):
        wait_for(lambda: 0, deadline=0.01, message="no luck")
