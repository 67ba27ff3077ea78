"""A storm: worker processes do jobs while blows fall on them; `Storm.rage` returns when every job has ended."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

from dbqueue import DBQueue
from dbqueue.runtime.worker import EXIT_ABANDONED
from tests.runtimes.jobs import notes
from tests.runtimes.lab import Process
from tests.storms.app import Gust, declare
from tests.storms.ledger import Ledger, Sums, keep_ledger
from tests.waiting import wait_for

APP = "tests.storms.app:queue"


class Storm:
    """``url`` is the workers', which may lead through a proxy; ``queue`` sees the database directly. Workers that end by
    themselves are replaced, as a supervisor does it; they may do so when their jobs ignore a timeout, and when the database is not
    there as they start."""

    def __init__(
        self, queue: DBQueue, url: str, folder: Path, *, workers: int, lease: float, seed: int = 20_240_229
    ) -> None:
        self.queue, self.folder = queue, folder
        self.chance = random.Random(seed)
        self.killed: list[tuple[bytes, bytes]] = []
        """Job and token of every claim that died with its worker."""
        self.kills = self.vain = 0
        self.jobs: list[UUID] = []
        self._url, self._lease, self._size = url, lease, workers
        self._postgres = queue.database.dialect.name == "postgresql"
        self._names: dict[int, str] = {}
        self.workers: list[Process] = []
        self._target = declare(queue, folder)
        queue.database.ready()
        keep_ledger(queue.database)

    # -- what the tables say -----------------------------------------------------------------------------------------

    def _read(self, statement: str) -> list[tuple[object, ...]]:
        return [tuple(row) for row in self.queue.database.read(lambda session: session.execute(statement))]

    @property
    def ended(self) -> int:
        return int(str(self._read("SELECT count(*) FROM dbqueue_finished")[0][0]))

    def _held(self) -> dict[int, list[tuple[bytes, bytes]]]:
        """Job and token of the claims of each process, by the name in the row."""
        found: dict[int, list[tuple[bytes, bytes]]] = {}
        for job, token, worker in self._read("SELECT id, token, worker FROM dbqueue_jobs WHERE state = 1"):
            assert isinstance(job, bytes)
            assert isinstance(token, bytes)
            found.setdefault(int(str(worker).split(":")[-3]), []).append((job, token))
        return found

    # -- blows -------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """A worker dies that holds a claim. What it held is read when nothing of it is left in the server either; if its last
        turn ended the claim at this very moment, the blow was in vain, and the next one dies."""
        while True:
            holding = wait_for(self._living_holders, 30, "no worker holds a claim")
            victim = self.chance.choice(holding)
            victim.kill()
            self.workers.remove(victim)
            if self._postgres:
                self._wait_until_gone(self._names[victim.popen.pid])
            lost = self._held().get(victim.popen.pid, [])
            self.start_worker()
            if lost:
                self.killed += lost
                self.kills += 1
                return
            self.vain += 1

    def _wait_until_gone(self, name: str) -> None:
        connections = f"SELECT 1 FROM pg_stat_activity WHERE application_name = '{name}'"
        wait_for(lambda: not self._read(connections), 30, "the server goes on with a dead worker")

    def _living_holders(self) -> list[Process]:
        self._replace_ended()
        held = self._held()
        return [worker for worker in self.workers if worker.popen.pid in held]

    def start_worker(self) -> None:
        url = self._url
        name = f"storm-{len(self._names)}"
        if self._postgres:
            url += f"?application_name={name}"
        worker = Process(url, self.folder, "-c", 2, "-l", "warning", options={"lease": self._lease}, app=APP)
        self._names[worker.popen.pid] = name
        self.workers.append(worker)

    def _replace_ended(self) -> None:
        for worker in [worker for worker in self.workers if worker.popen.poll() is not None]:
            assert worker.popen.returncode == EXIT_ABANDONED or "[connection_lost]" in worker.log, worker.log
            self.workers.remove(worker)
            self.start_worker()

    # -- the storm ---------------------------------------------------------------------------------------------------

    def rage(self, jobs: int, blows: Sequence[Callable[[], object]], deadline: float = 240) -> None:
        """The blows fall in this order, spread over the jobs; every fifth job fails once or twice by itself."""
        for _ in range(self._size):
            self.start_worker()
        gusts = [Gust(self.chance.uniform(0.02, 0.45), (n % 10 == 0) + (n % 5 == 0)) for n in range(jobs)]
        self.jobs = [ref.id for ref in self._target.enqueue_many(gusts)]
        for n, blow in enumerate(blows, start=1):
            self._wait_for_ends(n * jobs // (len(blows) + 1), deadline)
            blow()
        self._wait_for_ends(jobs, deadline)

    def _wait_for_ends(self, count: int, deadline: float) -> None:
        def ended() -> bool:
            self._replace_ended()
            threading.Event().wait(0.02)  # the storm needs the processor more than we do
            return self.ended >= count

        wait_for(ended, deadline, f"not {count} jobs have ended")

    def audit(self) -> Sums:
        """See ``Ledger.audit``; and the two tables say the same as the ledger."""
        self.stop()
        ledger = self.ledger()
        sums = ledger.audit(self.jobs, notes(self.folder), self.killed)
        counts = {state: n for state, n in self.queue.counts().items() if n}
        assert counts == {"succeeded": len(self.jobs)}
        attempts, lapses = self._read("SELECT sum(attempt), sum(lapses) FROM dbqueue_finished")[0]
        assert int(str(attempts)) == sums.claims - sums.released
        assert int(str(lapses)) == sums.killed + sums.starved
        return sums

    def ledger(self) -> Ledger:
        return Ledger(self.queue.database)

    def stop(self) -> None:
        for worker in self.workers:
            if worker.popen.poll() is None:
                worker.kill()
        self.workers.clear()
