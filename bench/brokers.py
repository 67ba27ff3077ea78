"""Redis and RabbitMQ from the system's packages, started on free ports of the loopback with their own defaults, and ended again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

RABBIT = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # Debian's; the one on the path changes its user


class Missing(Exception):
    """The server is not installed."""


class Broker:
    """A server process in a session of its own, so that all its processes can be counted and ended."""

    def __init__(
        self, command: list[str], port: int, folder: Path, *, afterwards: list[str] | None = None, **environ: str
    ) -> None:
        self.port, self._afterwards = port, afterwards
        self.process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environ}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 60
        while not _listens(port):
            if time.monotonic() > until or self.process.poll() is not None:
                self.close()
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.05)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._afterwards:
            subprocess.run(self._afterwards, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def redis(folder: Path) -> Broker:
    """As packaged: snapshots now and then, so what was accepted since the last one is lost with the process."""
    program = shutil.which("redis-server")
    if program is None:
        raise Missing("redis-server is not installed")
    port = _free_port()
    return Broker([program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)], port, folder)


def rabbitmq(folder: Path) -> Broker:
    if not os.path.exists(RABBIT):
        raise Missing("rabbitmq-server is not installed")
    port, names = _free_port(), str(_free_port())  # its name server outlives it
    return Broker(
        [RABBIT],
        port,
        folder,
        afterwards=["epmd", "-port", names, "-kill"],
        HOME=str(folder),
        RABBITMQ_NODENAME=f"bench{port}@localhost",
        RABBITMQ_NODE_PORT=str(port),
        RABBITMQ_DIST_PORT=str(_free_port()),
        RABBITMQ_MNESIA_BASE=str(folder / "mnesia"),
        RABBITMQ_LOG_BASE=str(folder / "log"),
        RABBITMQ_PID_FILE=str(folder / "pid"),
        RABBITMQ_ENABLED_PLUGINS_FILE=str(folder / "plugins"),
        ERL_EPMD_PORT=names,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
