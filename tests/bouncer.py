"""PgBouncer in front of a test's server, where the machine has it: Debian's package `pgbouncer`, or any on the path.

Its absence skips the test, in CI too: it comes with no Python package, and tests install nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.servers import _account, _as_user, _free_port
from tests.waiting import wait_for

_CONFIG = """
[databases]
* = host=127.0.0.1 port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = plain
auth_file = {folder}/users
pool_mode = {mode}
{more}
"""
# The shell ends it when the test session has ended, however it went: then nobody holds the other end of stdin any more.
_UNTIL_EOF = '"$0" -q "$1" & child=$!; read -r _; kill $child; wait $child'


@contextmanager
def bounced(url: str, mode: str, more: str = "") -> Iterator[str]:
    """The URL through a PgBouncer in this mode to the server of ``url``."""
    with tempfile.TemporaryDirectory(prefix="dbqueue-bouncer-") as folder:
        yield from _run(url, Path(folder), mode, more)


def _run(url: str, folder: Path, mode: str, more: str) -> Iterator[str]:
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("PgBouncer is not installed")
    parts, own_port, account = urlsplit(url), _free_port(), _account()
    config = _CONFIG.format(port=parts.port, own_port=own_port, folder=folder, mode=mode, more=more)
    (folder / "pgbouncer.ini").write_text(config)
    (folder / "users").write_text(f'"{parts.username}" "{parts.password}"\n')
    if account is not None:  # it refuses to run as root
        for path in (folder, *folder.iterdir()):
            os.chown(path, account.pw_uid, account.pw_gid)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", _UNTIL_EOF, program, folder / "pgbouncer.ini"],
            stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/", **_as_user(account),
        )  # fmt: skip
    bounced_url = parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{own_port}").geturl()
    try:
        wait_for(lambda: _answers(bounced_url), message=f"PgBouncer did not start, see {folder / 'log'}")
        yield bounced_url
    finally:
        process.communicate(b"\n", timeout=30)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
