"""Redis and RabbitMQ, for tests of what an app comes from, or keeps beside this broker: servers of a test's own on the loopback. A
missing one skips the test; `.ci/run` installs Redis, and its client library comes with the development dependencies.

A test's module or a conftest.py imports the fixtures `redis_url` and `rabbitmq_url`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers import _free_port
from tests.transport.shops import need_package
from tests.waiting import wait_for

RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # Debian's; the one on the path changes its user


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """Database 0 of an empty Redis that writes nothing to disk."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    need_package("redis")
    port = _free_port()
    with server([program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)], port):
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture
def rabbitmq_url(tmp_path: Path) -> Iterator[str]:
    if not RABBITMQ.exists():
        pytest.skip("rabbitmq-server is not installed")
    folder, port, names = tmp_path / "rabbitmq", _free_port(), str(_free_port())
    folder.mkdir()
    environment = {
        "HOME": str(folder), "RABBITMQ_NODENAME": f"test{port}@localhost", "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(_free_port()), "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"), "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"), "ERL_EPMD_PORT": names,
    }  # fmt: skip
    try:
        with server([str(RABBITMQ)], port, **environment):
            yield f"amqp://guest:guest@127.0.0.1:{port}//"
    finally:  # its name server outlives it, and stays as long as it has not noticed the end
        command = ["epmd", "-port", names, "-kill"]
        wait_for(lambda: b"Killed" in subprocess.run(command, capture_output=True).stdout, 20, "epmd stays")


@contextmanager
def server(command: list[str], port: int, **environment: str) -> Iterator[None]:
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None, f"{command[0]} ended at once"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(answers, 60, f"{command[0]} did not start")
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started; nothing in it is wanted any more
        process.wait()
