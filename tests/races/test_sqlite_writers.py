"""Eight writers on one SQLite file: each gets its share, and none waits long (D11).

SQLite's own busy_timeout fails this by far: it backs off so much that most writers get a single transaction in seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dbqueue.database.engine import Database

WRITERS = 8
SECONDS = 3.0

_SCRIPT = """
import json, os, sys, time
from dbqueue.database.engine import Database
from tests.factory import new_job

url, writers, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
reader, writer = os.pipe()
gate, opener = os.pipe()
for _ in range(writers):
    if os.fork() == 0:
        os.close(opener)
        database = Database(url)
        session = database.open_session()
        os.read(gate, 1)  # returns when the parent closes its end: all begin together
        count, longest, until = 0, 0.0, time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            session.begin()
            longest = max(longest, time.monotonic() - began)
            database.dialect.enqueue(session, new_job())
            session.commit()
            count += 1
        os.write(writer, (json.dumps([count, longest]) + "\\n").encode())
        os._exit(0)
os.close(opener)
os.close(writer)
sys.stdout.write(open(reader).read())
"""


@pytest.mark.databases("sqlite")
@pytest.mark.req("D11")
def test_eight_writers_share_one_file(fresh_db: Database) -> None:
    command = [sys.executable, "-c", _SCRIPT, f"sqlite:///{fresh_db.url.database}", str(WRITERS), str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    counts, waits = zip(*(json.loads(line) for line in done.stdout.splitlines()), strict=True)
    assert len(counts) == WRITERS
    with fresh_db.session() as session:
        assert session.execute("SELECT count(*) FROM dbqueue_jobs") == [(sum(counts),)]
    assert min(counts) >= sum(counts) / WRITERS / 3, counts
    assert max(waits) < 2, waits


_FORK = """
import os, sys, threading
from dbqueue.database.engine import Database
from tests.factory import new_job

database = Database(sys.argv[1])
asked, go = threading.Event(), threading.Event()
done = []

def write():
    with database.transaction() as session:
        database.dialect.enqueue(session, new_job())
        asked.set()
        go.wait()
    done.append("committed")

writer = threading.Thread(target=write)
writer.start()
asked.wait()
threading.Timer(0.3, go.set).start()
pid = os.fork()
if pid == 0:
    own = Database(sys.argv[1])
    own.run(lambda session: own.dialect.enqueue(session, new_job()))
    os._exit(0)
print(*done)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with database.transaction() as session:  # one that forks in its own transaction does not wait for itself
    if os.fork() == 0:
        os._exit(0)
writer.join()
"""


@pytest.mark.databases("sqlite")
@pytest.mark.req("D11")
def test_a_child_can_write_though_another_thread_was_writing_when_it_was_forked(fresh_db: Database) -> None:
    """It has the process's memory, where SQLite notes what is locked: a fork waits for the other thread's commit."""
    command = [sys.executable, "-W", "ignore", "-c", _FORK, f"sqlite:///{fresh_db.url.database}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], timeout=60
    )
    assert done.stdout.split() == ["committed", "0"]
