"""A queue in bad company: a snapshot that is held all the time, a million jobs before it and half a million that are not due yet,
a million finished ones beside it. Measured against a small queue with the same kind of jobs and nothing of that, in turns.

Jobs that become due while they are drained, and jobs that run twice, go through the index of what waits: they are fed in at a
quarter of the rate that the small queue has without them, so about a half of the drained jobs were waiting at some time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from bench.systems import SYSTEMS, Dbqueue
from bench.tally import Reader
from dbqueue.database.engine import Database
from tests.storms.crowd import claim_plans, hold_snapshot, rows_read
from tests.waiting import wait_for

if TYPE_CHECKING:
    from bench.__main__ import Bench

SLOTS = "16"


class Pinned:
    """Its two queues stay for all rounds, and the snapshot of the large one is as old as that queue."""

    def __init__(self, bench: Bench, name: str) -> None:
        system = SYSTEMS[name]
        if not isinstance(system, Dbqueue):
            raise SystemExit(f"pinned measures dbqueue itself: --systems dbqueue,dbqueue-sqlite, not {name}")
        self.bench, self.name, self.system = bench, name, system
        self.postgres = system.database == "postgresql"
        self.where = {"small": self._place("small"), "pinned": self._place("pinned")}
        self._numbers = iter("abcdeijklmnoqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        began = time.monotonic()
        self.crowd("pinned", "backlog", bench.options.n)
        print(f"# {name}: filled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        self.databases = {where: Database(self.url(where)) for where in self.where}
        self._tidy()
        self.snapshot = hold_snapshot(self.databases["pinned"])
        self.rate = self._drained("small", 0)["rate"]

    def close(self) -> None:
        self.snapshot.close()
        for database in self.databases.values():
            database.close()

    def round(self) -> None:
        feed = max(2, int(self.rate * self.bench.options.seconds / 4))
        found = {}
        for where in ("small", "pinned"):
            found[where] = self._drained(where, feed)
            self.bench.add(load="pinned", system=self.name, variant=where, **found[where])
        more = self._explained() if self.postgres else {}
        rates = {where: one["rate"] for where, one in found.items()}
        cpu = {where: one["worker_us"] + one["server_us"] for where, one in found.items()}
        self.bench.add(
            load="pinned", system=self.name, variant="ratio", ratio=round(rates["pinned"] / rates["small"], 3),
            cpu_ratio=round(cpu["pinned"] / cpu["small"], 3), **more,
        )  # fmt: skip

    # -- places ------------------------------------------------------------------------------------------------------

    def _place(self, where: str) -> dict[str, str]:
        folder = self.bench.dir / where
        folder.mkdir(exist_ok=True)
        environ = self.bench.environ | {"BENCH_DIR": str(folder)}
        if self.postgres:
            environ["BENCH_PG"] = self.bench.server.dsn(self.bench.server.create_database())
        return environ

    def url(self, where: str) -> str:
        place = self.where[where]
        return place["BENCH_PG"] if self.postgres else f"sqlite:///{place['BENCH_DIR']}/dbqueue.db"

    def crowd(self, where: str, *args: object) -> None:
        subprocess.run(self.bench.command(self.name, "crowd", *args), env=self.where[where], check=True)

    def _tidy(self) -> None:
        """The server's chores after a great fill are not what is measured."""
        if self.postgres:
            with self.databases["pinned"].session() as session:
                session.execute("VACUUM ANALYZE")
                session.execute("CHECKPOINT")

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _drained(self, where: str, feed: int) -> dict[str, Any]:
        """The rate of attempts that end while a worker drains the queue for some seconds."""
        options = self.bench.options
        if where == "small":
            self.crowd("small", "small", int(self.rate * options.seconds * 1.5) if feed else 20_000)
        rows = self._read_rows(where)
        if feed:
            self.crowd(where, "feed", next(self._numbers), feed, options.seconds)
        reader = Reader(self.bench.dir / "tally")
        environ = dict(self.where[where])
        if self.postgres:
            environ["BENCH_PG"] += "?application_name=bench-worker"
        worker = subprocess.Popen(self.bench.command(self.name, "work", SLOTS, 0), env=environ, start_new_session=True)
        try:
            until = time.monotonic() + 30
            while not reader.read()[0]:
                if worker.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{self.name}: the worker does nothing")
                time.sleep(0.001)
            done, before_cpu = reader.read()[0], self.bench.cpu([worker], self.system.database)
            time.sleep(options.seconds)
            total, first, last = reader.read()
            after_cpu = self.bench.cpu([worker], self.system.database)
        finally:
            worker.kill()
            worker.wait()
        n = max(1, total - done)
        worker_us, server_us = (
            round((after - before) / n * 1e6, 1) for before, after in zip(before_cpu, after_cpu, strict=True)
        )
        found: dict[str, Any] = {
            "rate": round(total / max(1e-9, (last - first) / 1e9), 1), "attempts": total, "worker_us": worker_us, "server_us": server_us,
        }  # fmt: skip
        if self.postgres:
            after = self._read_rows(where)
            found |= {name: round((after[name] - rows[name]) / total, 2) for name in after}
        return found

    def _read_rows(self, where: str) -> dict[str, int]:
        """What the server has read of the jobs so far, when no worker is left whose figures it does not have yet."""
        if not self.postgres:
            return {}
        others = (
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'bench-worker'"
        )
        with self.databases[where].session() as session:
            wait_for(lambda: not session.execute(others))
            return rows_read(session)

    def _explained(self) -> dict[str, int]:
        """What one claim of a worker costs while the snapshot is held: rows and pages, from the marks and from the beginning."""
        found: dict[str, int] = {}
        for kind, plan in claim_plans(self.databases["pinned"], int(SLOTS)).items():
            found |= {f"{kind}_rows": plan.rows_read, f"{kind}_pages": plan.pages}
        return found
