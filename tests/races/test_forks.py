"""A process that forks while its other threads work in SQLite: what celery's prefork pool does when it replaces a child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FORKS = 60
PROGRAM = """
import os, sys, threading, time
from dbqueue.database.engine import Database

url = sys.argv[1]
parents = Database(url)
parents.ready()
ended = threading.Event()


def busy():
    while not ended.is_set():
        own = parents.open_session()
        for _ in range(20):
            own.execute("SELECT count(*) FROM sqlite_master")
        own.close()


threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        own = Database(url).open_session()
        own.begin()
        own.commit()
        os._exit(0)
    until = time.monotonic() + 20
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.kill(child, 9)
            ended.set()
            sys.exit("a child hangs")
        time.sleep(0.001)
ended.set()
for thread in threads:
    thread.join(20)
print("all ended")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.req("C1")
def test_a_fork_while_other_threads_are_in_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, url, str(FORKS)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "all ended", "")
