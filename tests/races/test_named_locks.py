"""Never two holders of a lock: several processes that race for it, transactions that hold its row while it ends, and answers that
are lost on their way (A7, H14)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dbqueue import DBQueue, locks
from dbqueue.clock import SECOND
from dbqueue.database.engine import Database
from dbqueue.ids import new_token
from tests.factory import now
from tests.proxy import Proxy
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

# -- processes ---------------------------------------------------------------------------------------------------------

RACER = """
import json, random, sys, time
url, skew, shift, rounds, ttl = sys.argv[1], *map(float, sys.argv[2:])
wall = time.time
time.time = lambda: wall() + skew
from dbqueue import DBQueue

queue = DBQueue(url)
queue.database.clock.advance(shift)
queue.database.ready()
print("ready", flush=True)
sys.stdin.readline()
had = 0
while had < rounds:
    lock = queue.lock("race", ttl=ttl)
    if not lock.acquire():
        time.sleep(random.uniform(0, 0.003))
        continue
    began, how = time.monotonic(), had % 3
    had += 1
    if how == 0:  # forgets it: the next one waits for its end
        print(json.dumps([began, lock._until]), flush=True)
        continue
    time.sleep(random.uniform(0, 0.01))
    if how == 1 and not lock.renew():
        continue
    ended = min(time.monotonic(), lock._until)
    print(json.dumps([began, ended]), flush=True)
    lock.release()
sys.stdin.readline()
queue.close()
"""


class Racer:
    """A process whose wall clock is wrong by ``skew`` seconds. It says of each time that it had the lock from when until when."""

    def __init__(self, url: str, skew: float, rounds: int, ttl: float, shift: float = 0.0) -> None:
        command = [sys.executable, "-c", RACER, url, *map(str, (skew, shift, rounds, ttl))]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.popen = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def times(self) -> list[tuple[float, float]]:
        out, _ = self.popen.communicate(timeout=60)
        assert self.popen.returncode == 0
        return [(began, ended) for began, ended in map(json.loads, out.splitlines())]


@pytest.fixture
def race(fresh_db: Database) -> Iterator[Callable[..., Racer]]:
    made: list[Racer] = []

    def start(*args: Any, **more: Any) -> Racer:
        made.append(Racer(fresh_db.url.render_as_string(hide_password=False), *args, **more))
        return made[-1]

    yield start
    for racer in made:
        racer.popen.kill()
        racer.popen.communicate()


def apart(times: list[tuple[float, float]]) -> None:
    """No two of them had it at once: `time.monotonic` is one clock for all processes of a machine."""
    times.sort()
    for (_, ended), (began, _) in itertools.pairwise(times):
        assert began >= ended, f"two holders for {ended - began:.4f} s"


@pytest.mark.req("A7", "H14")
def test_processes_that_race_for_one_lock(race: Callable[..., Racer]) -> None:
    """Their own clocks are half a day apart, the database's is wrong by an hour; of three holders one forgets to release."""
    racers = [race(skew, 6, 0.1, shift=3600.0) for skew in (0.0, 6 * 3600.0, -6 * 3600.0)]
    for racer in racers:
        racer.go()
    all_times = [racer.times() for racer in racers]
    assert all(len(times) >= 4 for times in all_times), "each had its turns"
    apart([span for times in all_times for span in times])


@pytest.mark.req("A7")
def test_the_lock_of_a_killed_process_ends_with_its_time_to_live(
    race: Callable[..., Racer], fresh_db: Database
) -> None:
    racer = race(0.0, 1, 1.0)
    racer.go()
    assert racer.popen.stdout is not None
    _, until = json.loads(racer.popen.stdout.readline())
    racer.popen.send_signal(signal.SIGKILL)
    with closing(DBQueue(fresh_db.url.render_as_string(hide_password=False))) as queue:
        lock = queue.lock("race", ttl=30)
        wait_for(lock.acquire, 10)
        assert time.monotonic() >= until


# -- a row that somebody holds while the lock ends ----------------------------------------------------------------------


@contextmanager
def holder_of_the_row(db: Database, name: str) -> Iterator[Callable[[], None]]:
    """A stranger's transaction that changes the row, and takes it back when it is told to."""
    if db.dialect.name == "sqlite":
        connection: Any = sqlite3.connect(str(db.url.database), isolation_level=None, check_same_thread=False)
        connection.execute("BEGIN IMMEDIATE")
    else:
        connection = psycopg.connect(db.url.render_as_string(hide_password=False))
    mark = "?" if db.dialect.name == "sqlite" else "%s"
    connection.execute(f"UPDATE dbqueue_locks SET until = until + 600000000 WHERE name = {mark}", (name,))
    with closing(connection):
        yield connection.rollback


def waiting(db: Database) -> bool:
    """PostgreSQL says who waits for a row; SQLite's writers ask again and again, and only time tells."""
    if db.dialect.name == "sqlite":
        return True
    with db.session() as session:
        found = session.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    return bool(found[0][0] == 1)


@pytest.mark.req("A7", "H14")
@pytest.mark.parametrize("verb", ["renew", "release"])
def test_a_verb_that_waited_for_the_row_reads_the_clock_afterwards(fresh_db: Database, verb: str) -> None:
    db, token, answers = fresh_db, new_token(), list[bool]()
    assert db.run(lambda s: locks.acquire(db.dialect, s, "x", token, "me", round(0.4 * SECOND)))
    until = now(db) + round(0.4 * SECOND)
    verbs: dict[str, Callable[[Any], bool]] = {
        "renew": lambda s: locks.renew(db.dialect, s, "x", token, 600 * SECOND),
        "release": lambda s: locks.release(db.dialect, s, "x", token),
    }
    with holder_of_the_row(db, "x") as roll_back:
        thread = threading.Thread(target=lambda: answers.append(db.run(verbs[verb])))
        thread.start()
        wait_for(lambda: waiting(db))
        assert now(db) < until, "it began in time"
        wait_for(lambda: now(db) > until)
        roll_back()
        thread.join(10)
    assert answers == [False]
    other = new_token()
    assert db.run(lambda s: locks.acquire(db.dialect, s, "x", other, "you", SECOND)), "it is free"


@pytest.mark.req("A7", "H14")
@pytest.mark.databases("postgres", "postgres15")
@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("row", ["ended", "absent"])
def test_of_two_acquirers_one_wins(fresh_db: Database, ends: str, row: str) -> None:
    """The second one waits for the first one's transaction, and decides by what is there then."""
    db, answers = fresh_db, list[bool]()
    if row == "ended":
        assert db.run(lambda s: locks.acquire(db.dialect, s, "x", new_token(), "dead", 1))
    first = db.open_session()
    first.begin()
    assert locks.acquire(db.dialect, first, "x", new_token(), "first", 60 * SECOND)
    second = new_token()

    def ask() -> None:
        answers.append(db.run(lambda s: locks.acquire(db.dialect, s, "x", second, "second", 60 * SECOND)))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: waiting(db))
    getattr(first, ends)()
    thread.join(10)
    first.close()
    assert answers == [ends == "rollback"]
    assert db.run(lambda s: locks.owner_of(db.dialect, s, "x")) == ("second" if ends == "rollback" else "first")


@pytest.mark.req("A7", "A3")
@pytest.mark.databases("postgres", "postgres15")
def test_while_a_renewal_is_not_committed_nobody_takes_the_lock_over(fresh_db: Database) -> None:
    """So what is written in the transaction that renewed is written by the only holder, however long it takes."""
    db, token, answers = fresh_db, new_token(), list[bool]()
    assert db.run(lambda s: locks.acquire(db.dialect, s, "x", token, "me", round(0.3 * SECOND)))
    leader = db.open_session()
    leader.begin()
    assert locks.renew(db.dialect, leader, "x", token, 60 * SECOND)
    until = now(db) + round(0.3 * SECOND)

    def ask() -> None:
        answers.append(db.run(lambda s: locks.acquire(db.dialect, s, "x", new_token(), "you", SECOND)))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: waiting(db))
    wait_for(lambda: now(db) > until)
    assert not answers
    leader.commit()
    thread.join(10)
    leader.close()
    assert answers == [False]


# -- answers that are lost ---------------------------------------------------------------------------------------------


@pytest.mark.req("A7")
@pytest.mark.databases("postgres")
@pytest.mark.parametrize("loss", ["answer", "request"])
def test_a_lost_answer_costs_nobody_the_lock(database_url: str, loss: str) -> None:
    with closing(Proxy(database_url)) as proxy, closing(DBQueue(proxy.url)) as queue:
        queue.counts()
        lose = proxy.lose_answer if loss == "answer" else proxy.lose_request
        lock = queue.lock("import")
        for number, verb in enumerate((lock.acquire, lock.renew, lock.release), 1):
            lose(b"COMMIT\0")
            assert verb()
            assert proxy.losses == number
        assert queue.lock("import").acquire(), "it was released"
