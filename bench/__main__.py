"""`python -m bench WHAT [--systems a,b] [--rounds 5]`: every round visits each system once, and a figure is the median of rounds.

drain     no-op jobs from a filled queue: rate, and CPU of worker and server for each job
enqueue   one by one, durable; and in bulk
latency   from enqueue to start on an idle worker
results   Celery: from delay() to its result, a group of 1,000 and a chord of 100 with a client that waits
idle      statements and CPU of a worker that has nothing to do
pinned    drain of a queue with --n jobs, half as many future ones of a better priority and --n finished ones, while a snapshot is
          held all the time; against a small queue without one. A part of the jobs becomes due meanwhile, or runs twice

PostgreSQL is a server of our own on disk, with the defaults (fsync on). Peers are measured when they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import brokers
from bench.pinned import Pinned
from bench.systems import SYSTEMS
from bench.tally import Reader
from tests.servers import Server, Servers

TICK = os.sysconf("SC_CLK_TCK")


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.servers = Servers(on_disk=True)
        self.server: Server = self.servers.make(options.postgres, {"fsync": "on", "full_page_writes": "on"})
        self.dir = Path(tempfile.mkdtemp(prefix="dbqueue-bench-"))
        self.database = self.server.create_database()
        self.environ = dict(
            os.environ, BENCH_PG=self.server.dsn(self.database), BENCH_DIR=str(self.dir), BENCH_TALLY=str(self.dir / "tally"),
            PYTHONWARNINGS="ignore",
        )  # fmt: skip
        self.brokers: dict[str, brokers.Broker] = {}
        self.results: list[dict[str, Any]] = []
        self.pinned_queues: dict[str, Pinned] = {}

    def close(self) -> None:
        for pinned in self.pinned_queues.values():
            pinned.close()
        for broker in self.brokers.values():
            broker.close()
        self.servers.close()
        shutil.rmtree(self.dir, ignore_errors=True)

    def broker(self, database: str) -> None:
        """Starts the system's own server, once."""
        if database in ("redis", "rabbitmq") and database not in self.brokers:
            folder = self.dir / database
            folder.mkdir()
            self.brokers[database] = broker = getattr(brokers, database)(folder)
            self.environ["BENCH_REDIS" if database == "redis" else "BENCH_AMQP"] = (
                f"redis://127.0.0.1:{broker.port}/0"
                if database == "redis"
                else f"amqp://guest:guest@127.0.0.1:{broker.port}//"
            )

    def command(self, name: str, what: str, *args: object) -> list[str]:
        return [sys.executable, "-m", "bench.systems", name, what, *map(str, args)]

    def call(self, name: str, what: str, *args: object) -> Any:
        done = subprocess.run(
            self.command(name, what, *args), env=self.environ, check=True, stdout=subprocess.PIPE, text=True
        )
        return json.loads(done.stdout) if done.stdout.strip() else None

    def add(self, **result: Any) -> None:
        self.results.append(result)
        print(json.dumps(result), file=sys.stderr, flush=True)

    # -- loads -------------------------------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        system = SYSTEMS[name]
        wanted = self.options.variants.split(",") if self.options.variants else system.variants
        for variant in [v for v in system.variants if v in wanted] or system.variants[-1:]:
            self.call(name, "reset")
            self.call(name, "fill", self.options.n)
            if system.database == "postgresql":
                self.server.execute("CHECKPOINT")
            reader = Reader(self.dir / "tally")
            workers = self.start(name, variant, self.options.processes)
            try:
                self.measure(name, variant, reader, workers)
            finally:
                kill(workers)

    def measure(self, name: str, variant: str, reader: Reader, workers: list[subprocess.Popen[bytes]]) -> None:
        while not reader.read()[0]:
            if any(w.poll() is not None for w in workers):
                raise RuntimeError(f"{name}: the worker ended")
            time.sleep(0.001)
        began, done = time.monotonic(), reader.read()[0]
        cpu, server, wal = sum(map(cpu_of, workers)), self.server_cpu(SYSTEMS[name].database), self.wal(name)
        while (now := reader.read()[0]) < self.options.n and time.monotonic() - began < self.options.seconds:
            time.sleep(0.005)
        cpu, server = sum(map(cpu_of, workers)) - cpu, self.server_cpu(SYSTEMS[name].database) - server
        wal = self.wal(name) - wal
        total, first, last = reader.read()
        n = max(1, now - done)
        self.add(
            load="drain", system=name, variant=variant, rate=round(total / max(1e-9, (last - first) / 1e9), 1), jobs=total,
            worker_us=round(cpu / n * 1e6, 1), server_us=round(server / n * 1e6, 1),
            wal_bytes=round(wal / n),
        )  # fmt: skip

    def enqueue(self, name: str) -> None:
        self.call(name, "reset")
        self.add(load="enqueue", system=name, variant="one", **self.call(name, "one", self.options.seconds))
        self.call(name, "reset")
        self.add(
            load="enqueue", system=name, variant="bulk",
            **self.call(name, "bulk", 2_000 if name.startswith("celery") else 20_000),
        )  # fmt: skip

    def latency(self, name: str) -> None:
        if name == "floor":
            return
        self.call(name, "reset")
        reader = Reader(self.dir / "tally")
        workers = self.start(name, SYSTEMS[name].variants[0], 1)
        try:
            self.call(name, "paced", 20)
            wait_until(lambda: reader.read()[0] >= 20, 30)
            self.call(name, "paced", self.options.latencies)
            wait_until(lambda: reader.read()[0] >= 20 + self.options.latencies, 60)
            found = sorted(reader.latencies_ms()[20:])
            p50, p99 = found[len(found) // 2], found[int(len(found) * 0.99)]
            self.add(
                load="latency", system=name, variant=SYSTEMS[name].variants[0], p50=round(p50, 2), p99=round(p99, 2)
            )
        finally:
            kill(workers)

    def results_of(self, name: str) -> None:
        self.call(name, "reset")
        variant = SYSTEMS[name].variants[0]
        workers = self.start(name, variant, 1)
        try:
            figures = self.call(name, "wait", self.options.latencies, 1_000, 100)
            self.add(load="results", system=name, variant=variant, **figures)
        finally:
            kill(workers)

    def idle(self, name: str) -> None:
        if name == "floor":
            return
        self.call(name, "reset")
        reader = Reader(self.dir / "tally")
        workers = self.start(name, SYSTEMS[name].variants[0], 1)
        try:
            self.call(name, "paced", 3)
            wait_until(lambda: reader.read()[0] >= 3, 30)
            time.sleep(2)  # measuring an idle process is measuring over time
            database = SYSTEMS[name].database
            cpu, server, statements = cpu_of(workers[0]), self.server_cpu(database), self.statements()
            time.sleep(self.options.seconds)
            self.add(
                load="idle", system=name, variant="", cpu_percent=round((cpu_of(workers[0]) - cpu) / self.options.seconds * 100, 2),
                server_percent=round((self.server_cpu(database) - server) / self.options.seconds * 100, 2),
                transactions=round((self.statements() - statements) / self.options.seconds, 2),
            )  # fmt: skip
        finally:
            kill(workers)

    def pinned(self, name: str) -> None:
        if name not in self.pinned_queues:
            self.pinned_queues[name] = Pinned(self, name)
        self.pinned_queues[name].round()

    def wal(self, name: str) -> int:
        """Bytes that the server has written to its log."""
        if SYSTEMS[name].database != "postgresql":
            return 0
        return int(self.server.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])

    def statements(self) -> int:
        """Transactions that the server has ended in our database; an idle worker's statements are one transaction each."""
        row = self.server.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", (self.database,)
        )
        return int(row[0][0])

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str, variant: str, processes: int) -> list[subprocess.Popen[bytes]]:
        return [
            subprocess.Popen(
                self.command(name, "work", variant, slot),
                env=self.environ,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
            )
            for slot in range(processes)
        ]

    def cpu(self, workers: list[subprocess.Popen[bytes]], database: str) -> tuple[float, float]:
        """Seconds of the processor so far: the workers', and the server's."""
        return sum(map(cpu_of, workers)), self.server_cpu(database)

    def server_cpu(self, database: str) -> float:
        """A broker's session; or the postmaster with all its children, those that have ended included."""
        if database in self.brokers:
            return cpu_of(self.brokers[database].process)
        if database == "sqlite":
            return 0.0
        pid = self.server.pid
        fields = stat(pid)
        own = sum(int(fields[i]) for i in (11, 12, 13, 14)) / TICK if fields else 0.0
        for entry in os.listdir("/proc"):
            if entry.isdigit() and (child := stat(int(entry))) and int(child[1]) == pid:
                own += (int(child[11]) + int(child[12])) / TICK
        return own


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: [0] is the state, [1] the parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_of(process: subprocess.Popen[bytes]) -> float:
    """Of the process and all others of its session."""
    found = [stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()]
    return sum(int(f[11]) + int(f[12]) for f in found if f and int(f[3]) == process.pid) / TICK


def kill(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def wait_until(fact: Any, deadline: float) -> None:
    until = time.monotonic() + deadline
    while not fact():
        if time.monotonic() > until:
            raise RuntimeError("the jobs did not end")
        time.sleep(0.01)


def report(results: list[dict[str, Any]]) -> None:
    """Medians, and each system's ratio to the first one named for the load."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["load"], r["system"], r["variant"]), []).append(r)
    for (load, system, variant), rows in groups.items():
        figures = {
            k: round(statistics.median(r[k] for r in rows), 2)
            for k, v in rows[0].items()
            if isinstance(v, (int, float))
        }
        print(
            f"{load:<8} {system:<15} {variant:>5}  "
            + "  ".join(f"{k} {v}" for k, v in figures.items())
            + f"  ({len(rows)} rounds)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("load", choices=["drain", "enqueue", "latency", "results", "idle", "pinned"])
    parser.add_argument("--systems", default="")
    parser.add_argument("--variants", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--latencies", type=int, default=200)
    parser.add_argument("--postgres", type=int, default=18)
    options = parser.parse_args()
    options.systems = options.systems or (
        "results-rabbitmq-redis,results-dbqueue,results-dbqueue-sqlite"
        if options.load == "results"
        else "dbqueue,pgqueuer,floor,dbqueue-sqlite,huey-sqlite"
    )
    bench = Bench(options)
    try:
        print(
            f"# {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, {bench.server}",
            file=sys.stderr,
        )
        for _ in range(options.rounds):
            for name in options.systems.split(","):
                for database in (SYSTEMS[name].database, *SYSTEMS[name].beside):
                    bench.broker(database)
                getattr(bench, "results_of" if options.load == "results" else options.load)(name)
        report(bench.results)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
