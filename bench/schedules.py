"""Ten thousand schedules that are all due in one minute: seconds until one beat has written their jobs. And what that beat asks of the
database in a second in which nothing is due.
"""

from __future__ import annotations

import time
from contextlib import closing
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from bench.systems import SYSTEMS, Dbqueue
from dbqueue import DBQueue, using
from dbqueue.clock import SECOND, to_instant
from dbqueue.database.engine import Database
from dbqueue.runtime.beat import Beat

if TYPE_CHECKING:
    from bench.__main__ import Bench

SCHEDULES = 10_000
BEFORE = to_instant(datetime(2030, 1, 7, 2, 0, 1, tzinfo=timezone.utc))
DUE = BEFORE + 3600 * SECOND


def round_of(bench: Bench, name: str) -> None:
    system = SYSTEMS[name]
    if not isinstance(system, Dbqueue):
        raise SystemExit(f"schedules measures dbqueue itself: --systems dbqueue,dbqueue-sqlite, not {name}")
    postgres = system.database == "postgresql"
    bench.call(name, "reset")
    url = bench.environ["BENCH_PG"] if postgres else f"sqlite:///{bench.dir}/dbqueue.db"
    with closing(DBQueue(url)) as queue:
        database = queue.database
        set_clock(database, BEFORE)
        began = time.monotonic()
        with database.transaction() as session, using(session.connection):
            for number in range(SCHEDULES):
                queue.schedule(f"schedule-{number:05}", "0 3 * * *", "bench", {"number": number})
        declared = time.monotonic() - began
        beat = Beat(database, name="bench")
        beat.start()
        try:
            began = time.monotonic()
            until_rest(beat)
            planned = time.monotonic() - began
            set_clock(database, DUE)
            began, cpu = time.monotonic(), time.process_time()
            server = bench.server_cpu(system.database)
            until_rest(beat)
            fired, cpu = time.monotonic() - began, time.process_time() - cpu
            assert beat.fired == SCHEDULES
            server = bench.server_cpu(system.database) - server
            rest(beat, 2)  # the server counts transactions with a delay
            transactions, idle_cpu, began = bench.statements(), time.process_time(), time.monotonic()
            rest(beat, max(bench.options.seconds, 10))
            idle_cpu, seconds = time.process_time() - idle_cpu, time.monotonic() - began
            time.sleep(1.5)
            transactions = bench.statements() - transactions
            idle = {"idle_transactions": round(transactions / seconds, 2)} if postgres else {}
            bench.add(
                load="schedules", system=name, variant=str(SCHEDULES), declared=round(declared, 2), planned=round(planned, 2),
                fired=round(fired, 2), beat_us=round(cpu / SCHEDULES * 1e6, 1), server_us=round(server / SCHEDULES * 1e6, 1),
                **idle, idle_cpu_percent=round(idle_cpu / seconds * 100, 2),
            )  # fmt: skip
        finally:
            beat.close()


def set_clock(database: Database, instant: int) -> None:
    with database.session() as session:
        database.clock.offset += instant - database.dialect.now(session)


def until_rest(beat: Beat) -> None:
    while beat.step() == 0:
        pass


def rest(beat: Beat, seconds: float) -> None:
    """As a beat does that has nothing to fire."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(beat.step())
