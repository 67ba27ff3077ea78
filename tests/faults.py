"""Faults of the world around a database, made by hand: a host that vanishes, a proxy that freezes, a disk that is full, a standby.

Some need the right to make networks or mounts; where that is missing, the test is skipped.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.servers import Server
from tests.waiting import wait_for


class Relay:
    """Forwards to the server of a URL until ``freeze``: from then on it takes what is sent, acknowledges it (the kernel does), forwards
    nothing, and keeps every connection open. New ones are taken and left alone, too."""

    def __init__(self, url: str, host: str = "127.0.0.1") -> None:
        parts = urlsplit(url)
        self._server = (str(parts.hostname), int(parts.port or 5432))
        self._listener = socket.create_server((host, 0))
        user = parts.netloc.rpartition("@")[0]
        self.url = urlunsplit(parts._replace(netloc=f"{user}@{host}:{self._listener.getsockname()[1]}"))
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self.taken = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        """For connections made from now on; what was frozen is cut."""
        self._cut()
        self._open.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()
        self._open.set()

    def _cut(self) -> None:
        for end in list(self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.taken += 1
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(data)
        self._open.wait()  # a frozen proxy does not tell that the other side has gone either
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@dataclass
class Wire:
    """A network of two hosts: ours, at ``address``, and one that ``prefix`` runs a command in. ``cut`` loses every packet between
    them without a word to either, ``join`` ends that."""

    address: str
    prefix: tuple[str, ...]
    cut: Callable[[], None]
    join: Callable[[], None]


@contextmanager
def two_hosts() -> Iterator[Wire]:
    """The other host is a network namespace, which ends with the process that holds it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        pytest.skip("networks of our own need root and iproute2")
    holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    name, inside = f"dbq{os.getpid() % 100_000}", ("nsenter", "-t", str(holder.pid), "-n")
    block = os.getpid() % 250
    ours, other = f"10.213.{block}.1", f"10.213.{block}.2"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def made() -> bool:
        return os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net")

    try:
        wait_for(made)
        try:
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        except subprocess.CalledProcessError:
            pytest.skip("this machine makes no networks")
        run("ip", "addr", "add", f"{ours}/30", "dev", name)
        run("ip", "link", "set", name, "up")
        run(*inside, "ip", "addr", "add", f"{other}/30", "dev", "eth0")
        run(*inside, "ip", "link", "set", "eth0", "up")
        # The other host's packets go to an address that nobody has, and are lost there: no carrier is missing, no error comes back.
        yield Wire(
            ours,
            inside,
            cut=lambda: run(
                "ip", "neigh", "replace", other, "lladdr", "02:00:00:00:00:01", "dev", name, "nud", "permanent"
            ),
            join=lambda: run("ip", "neigh", "del", other, "dev", name),
        )
    finally:
        holder.kill()
        holder.wait()
        subprocess.run(["ip", "link", "del", name], capture_output=True)


@dataclass
class Disk:
    """A small disk in memory."""

    path: Path

    def fill(self) -> None:
        with (self.path / "ballast").open("ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0")

    def free(self) -> None:
        (self.path / "ballast").unlink()


@contextmanager
def small_disk(folder: Path, megabytes: int = 16, owner: pwd.struct_passwd | None = None) -> Iterator[Disk]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    path = folder / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,uid={owner.pw_uid if owner else 0}", "none", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def make_standby(primary: Server, make_server: Callable[..., Server]) -> Server:
    """A server that follows ``primary``, which has to wait for it with every commit (``synchronous_standby_names``)."""
    standby = make_server(primary.major)
    standby.stop("immediate")
    data: Path = standby._data
    shutil.rmtree(data)
    source = primary.dsn("postgres").replace("/postgres", "/") + "?application_name=standby"
    done = subprocess.run(
        [standby._bin / "pg_basebackup", "-d", source, "-D", data, "-R", "-X", "stream", "-c", "fast"],
        capture_output=True, text=True, **standby._child,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    standby._password = primary._password
    standby.start()
    return standby


def promote(server: Server) -> None:
    server.execute("SELECT pg_promote(true, 30)")


def both(first: Server, second: Server, name: str, options: dict[str, Any] | None = None) -> str:
    """One URL for two servers, of which the one that can write is taken."""
    user = urlsplit(first.dsn(name)).netloc.rpartition("@")[0]
    hosts = f"host=127.0.0.1:{first.port}&host=127.0.0.1:{second.port}"
    more = "".join(f"&{key}={value}" for key, value in (options or {}).items())
    return f"postgresql://{user}@/{name}?{hosts}&target_session_attrs=read-write{more}"
