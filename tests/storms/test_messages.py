"""Celery's workers in a storm, and beside a million messages that wait for their ETA.

The storm is small in `make test` and great in `make soak`: two workers, which are killed, connections that are cut (on SQLite the
write lock is held for longer than a lease), and a publisher that rolls a third of its transactions back.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

import dbqueue
from dbqueue import DBQueue
from dbqueue.states import State
from tests.storms.crowd import copy_message
from tests.transport.shops import Shop
from tests.waiting import wait_for

TASKS = """
@app.task(shared=False, acks_late=True, bind=True)
def gust(self, seconds):
    note(f"{{self.request.id}} {{os.getppid()}} {{self.request.delivery_info['redelivered']}}")
    time.sleep(seconds)

@app.task(shared=False)
def drop():
    pass
"""


@contextmanager
def open_shop(folder: Path, url: str, **options: Any) -> Iterator[tuple[Shop, Any]]:
    """The shop and its module, of which there may be several: all are called ``shop``."""
    folder.mkdir()
    shop = Shop(folder, f"dbqueue+{url}", options)
    with (folder / "shop.py").open("a") as file:
        file.write(TASKS.format())
    module = shop.app
    del sys.modules["shop"]
    sys.path.remove(str(folder))
    try:
        yield shop, module
    finally:
        shop.close()
        module.app.close()


# -- the storm ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    messages: int
    kills: int
    cuts: int


@dataclass(frozen=True)
class Run:
    """What a task noted when it began."""

    worker: int
    redelivered: bool


class RolledBack(Exception):
    pass


class Gale:
    """Workers and a publisher. The publisher writes each message's name into a table in the transaction that publishes it: what that
    table says was committed."""

    LEASE = 2.0
    PAUSE = 0.004
    """Seconds that a task takes."""
    AHEAD = 100
    """Messages that may wait: the publisher is to be there when a blow falls."""

    def __init__(self, shop: Shop, gust: Any, queue: DBQueue, url: str, seed: int = 20_240_229) -> None:
        self.shop, self.gust, self.queue = shop, gust, queue
        self.chance = random.Random(seed)
        self.postgres = queue.database.dialect.name == "postgresql"
        self.killed: set[int] = set()
        self.published = self.rolled_back = self.broken = 0
        self._ended = 0
        self._stop = False
        self._engine = create_engine(
            url.replace("postgresql://", "postgresql+psycopg://"), connect_args={} if self.postgres else {"timeout": 60}
        )
        self._eye = queue.database.open_session()
        self._eye.execute("CREATE TABLE orders (name text PRIMARY KEY)")

    def close(self) -> None:
        self._stop = True
        self._eye.close()
        self._engine.dispose()

    # -- the publisher -----------------------------------------------------------------------------------------------

    def publish(self, messages: int) -> None:
        """Transactions of one to eight messages, until so many are committed for certain."""
        names = (f"m{number}" for number in range(10 * messages))
        while self.published < messages and not self._stop:
            while self.published > self._ended + self.AHEAD and not self._stop:
                threading.Event().wait(0.02)
            count = self.chance.randint(1, 8)
            try:
                with Session(self._engine) as session, session.begin(), dbqueue.using(session):
                    for _ in range(count):
                        name = next(names)
                        session.execute(text("INSERT INTO orders VALUES (:name)"), {"name": name})
                        self.gust.apply_async((self.PAUSE,), task_id=name)
                    if self.chance.random() < 1 / 3:
                        raise RolledBack
                self.published += count
            except RolledBack:
                self.rolled_back += 1
            except (dbqueue.QueueError, SQLAlchemyError):
                self.broken += 1  # whether it was committed is what the table says

    # -- blows -------------------------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        number = len(self.shop.workers)
        self.shop.celery("worker", "-n", f"w{number}@shop", "-c", "2", "-l", "INFO", "--prefetch-multiplier", "8")

    def kill(self) -> None:
        """With its children, when it has messages in its hands."""

        def holders() -> dict[int, int]:
            rows = self._eye.execute("SELECT worker, count(*) FROM dbqueue_jobs WHERE state = 1 GROUP BY worker")
            found = {int(str(worker).split(":")[-3]): int(count) for worker, count in rows}
            return {pid: count for pid, count in found.items() if pid not in self.killed}

        pid = self.chance.choice(sorted(wait_for(holders, 60, "no worker has a message")))
        (victim,) = (worker for worker in self.shop.workers if worker.pid == pid)
        os.killpg(pid, signal.SIGKILL)
        victim.wait()
        self.killed.add(pid)
        self.start_worker()

    def cut(self) -> None:
        """Every connection ends but the test's own. On SQLite there is none: somebody holds the write lock, longer than a lease."""
        if self.postgres:
            self._eye.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return
        self._eye.begin(time.monotonic() + 30)
        threading.Event().wait(1.25 * self.LEASE)
        self._eye.commit()

    # -- the storm ---------------------------------------------------------------------------------------------------

    def rage(self, size: Size, deadline: float) -> None:
        """The blows fall in a random order, spread over the messages."""
        blows: list[Callable[[], None]] = [self.kill] * size.kills + [self.cut] * size.cuts
        self.chance.shuffle(blows)
        publisher = threading.Thread(target=self.publish, args=(size.messages,))
        for _ in range(2):
            self.start_worker()
        publisher.start()
        try:
            for n, blow in enumerate(blows, start=1):
                self._wait_for_ends(n * size.messages // (len(blows) + 1), deadline)
                blow()
            self._wait_for_ends(size.messages, deadline)
            wait_for(lambda: not publisher.is_alive(), deadline, "the publisher does not end")
            self._wait_for_ends(len(self.committed()), deadline)
        finally:
            self._stop = True
            publisher.join()

    def committed(self) -> set[str]:
        return {str(name) for (name,) in self._eye.execute("SELECT name FROM orders")}

    def _wait_for_ends(self, count: int, deadline: float) -> None:
        def ended() -> bool:
            for worker, log in zip(self.shop.workers, self.shop.logs, strict=True):
                assert worker.poll() is None or worker.pid in self.killed, log.read_text()
            threading.Event().wait(0.02)  # the storm needs the processor more than we do
            self._ended = int(self._eye.execute("SELECT count(*) FROM dbqueue_finished")[0][0])
            return self._ended >= count

        wait_for(ended, deadline, f"not {count} messages have ended")

    def audit(self) -> tuple[int, int, int]:
        """Exactly what was committed ran, and ended once. What ran again had lost a lease, was told so, and its worker was dead or cut
        off. Returns how many messages there were, how many runs too many, and how many of those before had a living worker."""
        runs: dict[str, list[Run]] = defaultdict(list)
        for line in self.shop.notes:
            name, pid, redelivered = line.split()
            runs[name].append(Run(int(pid), redelivered == "True"))
        assert runs.keys() == self.committed()
        assert self._eye.execute("SELECT count(*) FROM dbqueue_jobs")[0][0] == 0
        rows = self._eye.execute("SELECT task_id, state, lapses FROM dbqueue_finished")
        assert len(rows) == len(runs)
        again = alive = 0
        for name, state, lapses in rows:
            first, *others = runs[name]
            told = (name, lapses, first, others)
            assert state == State.ACKED, told
            assert len(others) <= lapses, told
            assert all(run.redelivered for run in others), told
            assert lapses or not first.redelivered, told
            again += len(others)
            alive += sum(run.worker not in self.killed for run in runs[name][:-1])
        return len(rows), again, alive


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(Size(300, 1, 2), id="small"),
        pytest.param(Size(20_000, 12, 24), id="great", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.req("C4", "C5")
def test_exactly_what_was_committed_is_done(database_url: str, tmp_path: Path, size: Size) -> None:
    with (
        closing(DBQueue(database_url)) as queue,
        open_shop(tmp_path / "shop", database_url, lease=Gale.LEASE) as (shop, module),
    ):
        queue.migrate()
        with closing(Gale(shop, module.gust, queue, database_url)) as gale:
            began = time.monotonic()
            gale.rage(size, 600)
            messages, again, alive = gale.audit()
            took = time.monotonic() - began
    print(f"{messages} messages in {took:.0f} s, {len(gale.killed)} workers killed, {size.cuts} cuts")
    print(f"transactions: {gale.rolled_back} rolled back, {gale.broken} broken")
    print(f"{again} runs again, of which {alive} beside a living worker")
    assert gale.rolled_back > 0
    assert len(gale.killed) == size.kills
    if not gale.postgres:
        assert alive == 0, "a living worker's lease is not taken, however long the lock is held"


# -- a million ETAs ----------------------------------------------------------------------------------------------------


class Pond:
    """A worker, on a queue with so many messages whose ETA is days away."""

    AHEAD = 10.0
    """Seconds from the first publishing of a round to the instant at which its messages are due."""

    def __init__(self, folder: Path, url: str, waiting: int, stack: ExitStack) -> None:
        self.queue = stack.enter_context(closing(DBQueue(url)))
        self.queue.migrate()
        shop, module = stack.enter_context(open_shop(folder, url, eta_lead=0))
        self._drop = module.drop
        self._engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        stack.callback(self._engine.dispose)
        if waiting:
            self._drop.apply_async(countdown=1e6)
            copy_message(self.queue.database, waiting - 1, 0.001)
            if self.queue.database.dialect.name == "postgresql":
                with self.queue.database.session() as session:
                    session.execute("VACUUM ANALYZE dbqueue_jobs")
        self.worker = shop.worker("--prefetch-multiplier", "8")
        self.drain(100)

    def drain(self, messages: int) -> float:
        """So many messages are written in one transaction, wait, and are due at the same instant. Returns how many a second were done
        from then on."""
        due = datetime.now(timezone.utc) + timedelta(seconds=self.AHEAD)
        before = self._ended()[0]
        with Session(self._engine) as session, session.begin(), dbqueue.using(session):
            for _ in range(messages):
                self._drop.apply_async(eta=due)
        due = max(due, datetime.now(timezone.utc))  # on a crowded machine publishing takes longer
        wait_for(lambda: self._ended()[0] == before + messages, 120, "not all messages were done")
        return messages / (self._ended()[1] / 1e6 - due.timestamp())

    def _ended(self) -> tuple[int, int]:
        """How many messages have ended, and when the last."""
        found = self.queue.database.read(
            lambda session: session.execute("SELECT count(*), max(finished_at) FROM dbqueue_finished")
        )
        return int(found[0][0]), int(found[0][1] or 0)

    def rss(self) -> float:
        """MB of the worker's main process."""
        status = Path(f"/proc/{self.worker.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.req("C3")
def test_a_million_messages_that_wait_cost_a_worker_nothing(
    make_database_url: Callable[[], str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        ponds = {
            name: Pond(tmp_path / name, make_database_url(), waiting, stack)
            for name, waiting in (("empty", 0), ("large", 1_000_000))
        }
        began = {name: pond.rss() for name, pond in ponds.items()}
        rates: dict[str, list[float]] = {name: [] for name in ponds}
        for _ in range(5):
            for name, pond in ponds.items():
                rates[name].append(pond.drain(2_000))
        ended = {name: pond.rss() for name, pond in ponds.items()}
        waiting = ponds["large"].queue.counts("shop")["pending"]
    medians, best = (of(rates["large"]) / of(rates["empty"]) for of in (median, max))
    print(
        {name: [round(rate) for rate in found] for name, found in rates.items()},
        f"medians {medians:.2f}, best {best:.2f}",
    )
    print("MB before", began, "and after", ended)
    assert waiting == 1_000_000
    assert began["large"] - began["empty"] < 5
    assert ended["large"] - ended["empty"] < 5
    assert best >= 0.9, "other work on the machine makes a round slow, never fast"
