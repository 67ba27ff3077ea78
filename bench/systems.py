"""The systems that are measured: how each is emptied, filled and worked on. Run as ``python -m bench.systems NAME work|produce ...``
in a process of its own; environment: BENCH_PG (a URL), BENCH_DIR (a folder on disk), BENCH_TALLY (the counter's file)."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from bench.tally import Tally

PAYLOAD = "x" * 170  # with its frame about 200 bytes of JSON
PG = os.environ.get("BENCH_PG", "")
DIR = Path(os.environ.get("BENCH_DIR", "."))


def tally(slot: int) -> Tally:
    return Tally(os.environ["BENCH_TALLY"], slot)


class System:
    name: ClassVar[str]
    database: ClassVar[str] = "postgresql"
    variants: ClassVar[tuple[str, ...]] = ("",)
    beside: ClassVar[tuple[str, ...]] = ()
    """Servers that it needs beside its database."""

    def reset(self) -> None:
        """An empty queue with its schema."""

    def fill(self, n: int) -> None:
        """n jobs, as quickly as it can."""
        raise NotImplementedError

    def open(self) -> Callable[[int], object]:
        """The producer: a function that enqueues one durable job; its argument is the time sent (0: not wanted)."""
        raise NotImplementedError

    def bulk(self, n: int) -> None:
        self.fill(n)

    def work(self, variant: str, slot: int) -> None:
        """The worker, until it is killed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Noop:
    text: str
    sent: int = 0


@dataclass(frozen=True)
class Mixed:
    text: str
    again: bool = False
    """Its first attempt asks for a second one."""


class Dbqueue(System):
    name = "dbqueue"
    variants = ("4", "16", "100")

    def url(self) -> str:
        return PG

    def queue(self, **options: Any) -> tuple[Any, Any]:
        from dbqueue import DBQueue, RetryLater, current_job

        queue = DBQueue(self.url(), **options)
        counter: list[Tally] = []
        self.counter = counter

        @queue.job(max_attempts=5, timeout=30, name="bench.noop")
        def noop(job: Noop) -> None:
            counter[0].hit(job.sent)

        @queue.job(max_attempts=5, timeout=30, name="bench.mixed")
        def mixed(job: Mixed) -> None:
            counter[0].hit()
            running = current_job()
            if job.again and running is not None and running.attempt == 1:
                raise RetryLater(delay=0.2)

        self.mixed = mixed
        return queue, noop

    def reset(self) -> None:
        reset_postgres()
        self.queue()[0].migrate()

    def fill(self, n: int) -> None:
        _, noop = self.queue()
        for _ in range(n // 1_000):
            noop.enqueue_many([Noop(PAYLOAD)] * 1_000)

    def crowd(self, what: str, *args: str) -> None:
        """Jobs for the load `pinned`, written in SQL. backlog N: claimable ones, others that are not due, a history. small N: claimable
        ones. feed LETTER N SECONDS: jobs that become due one after the other, of which every second one wants two attempts."""
        from tests.storms.crowd import fill_history, fill_jobs

        if what != "feed":
            self.reset()
        queue, _ = self.queue()
        once, fill = Mixed(PAYLOAD), partial(fill_jobs, queue.database, self.mixed)
        if what == "feed":
            n = int(args[1])
            twice, step = Mixed(PAYLOAD, again=True), float(args[2]) / n
            fill(args[0], n, priority=1, first=0.5, step=step, once=once, twice=twice)
            return
        n = int(args[0])
        fill("p", n, once=once)
        if what == "backlog":
            fill("f", n // 2, priority=5, first=1e6, step=0.001, once=once)
            fill_history(queue.database, self.mixed, n)

    def open(self) -> Callable[[int], object]:
        _, noop = self.queue()
        return lambda sent: noop.enqueue(Noop(PAYLOAD, sent))

    def work(self, variant: str, slot: int) -> None:
        from dbqueue.runtime.worker import WorkerOptions, run_worker

        queue, _ = self.queue()
        self.counter.append(tally(slot))
        logging.disable(logging.ERROR)
        run_worker(queue, WorkerOptions(slots=int(variant or 4)))


class DbqueueSqlite(Dbqueue):
    name = "dbqueue-sqlite"
    database = "sqlite"

    def url(self) -> str:
        return f"sqlite:///{DIR}/dbqueue.db"

    def reset(self) -> None:
        wipe("dbqueue.db")
        self.queue()[0].migrate()


class Floor(System):
    """What one connection can do without any rule: pipelined claim and plain DELETE, no history, no lock, no clock."""

    name = "floor"
    variants = ("4", "16", "100")
    _claim = (
        "UPDATE floor SET state = 1 WHERE id = ANY(ARRAY(SELECT id FROM floor WHERE state = 0 ORDER BY id LIMIT {n} "
        "FOR UPDATE SKIP LOCKED)) RETURNING id, payload"
    )

    def reset(self) -> None:
        reset_postgres()
        with connect() as connection:
            connection.execute(
                "CREATE TABLE floor (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, state int, payload bytea)"
            )
            connection.execute("CREATE INDEX ON floor (id) WHERE state = 0")

    def fill(self, n: int) -> None:
        with connect() as connection:
            connection.execute(
                "INSERT INTO floor (state, payload) SELECT 0, %s FROM generate_series(1, %s)", (PAYLOAD.encode(), n)
            )

    def open(self) -> Callable[[int], object]:
        connection = connect()
        return lambda sent: connection.execute("INSERT INTO floor (state, payload) VALUES (0, %s)", (PAYLOAD.encode(),))

    def work(self, variant: str, slot: int) -> None:
        counter, connection, done = tally(slot), connect(), []
        claim = self._claim.format(n=int(variant))
        while True:
            with connection.pipeline():
                cursor = connection.cursor(binary=True)
                if done:
                    connection.execute("DELETE FROM floor WHERE id = ANY(%s)", (done,), prepare=True)
                cursor.execute(claim, prepare=True)
            done = [row[0] for row in cursor.fetchall()]
            for _ in done:
                counter.hit()


class PgQueuer(System):
    """Asynchronous, asyncpg; batch 10 is its default, 100 the tuned one."""

    name = "pgqueuer"
    variants = ("100",)

    def run(self, body: Callable[[Any, Any], Any]) -> Any:
        async def main() -> Any:
            import asyncpg
            from pgqueuer.db import AsyncpgDriver

            connection = await asyncpg.connect(PG)
            try:
                return await body(connection, AsyncpgDriver(connection))
            finally:
                await connection.close()

        return asyncio.run(main())

    def reset(self) -> None:
        from pgqueuer.queries import Queries

        reset_postgres()
        self.run(lambda connection, driver: Queries(driver).install())

    def fill(self, n: int) -> None:
        from pgqueuer.queries import Queries

        async def body(connection: Any, driver: Any) -> None:
            for _ in range(n // 1_000):
                await Queries(driver).enqueue(["noop"] * 1_000, [PAYLOAD.encode()] * 1_000, [0] * 1_000)

        self.run(body)

    def open(self) -> Callable[[int], object]:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        loop = asyncio.new_event_loop()
        queries = Queries(AsyncpgDriver(loop.run_until_complete(asyncpg.connect(PG))))
        return lambda sent: loop.run_until_complete(queries.enqueue("noop", str(sent or "").encode()))

    def work(self, variant: str, slot: int) -> None:
        counter = tally(slot)

        async def body(connection: Any, driver: Any) -> None:
            from pgqueuer import PgQueuer as Library

            library = Library(driver)

            @library.entrypoint("noop")
            async def noop(job: Any) -> None:
                text = job.payload.decode() if job.payload else ""
                counter.hit(int(text) if text.isdigit() else 0)

            await library.run(batch_size=int(variant))

        self.run(body)


class Procrastinate(System):
    name = "procrastinate"
    variants = ("10",)

    def app(self) -> tuple[Any, Any]:
        import procrastinate

        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=PG))
        self.counter: list[Tally] = []

        @app.task(name="noop")
        async def noop(text: str, sent: int) -> None:
            self.counter[0].hit(sent)

        return app, noop

    def reset(self) -> None:
        reset_postgres()
        app, _ = self.app()

        async def body() -> None:
            async with app.open_async():
                await app.schema_manager.apply_schema_async()

        asyncio.run(body())

    def fill(self, n: int) -> None:
        app, noop = self.app()

        async def body() -> None:
            async with app.open_async():
                for _ in range(n // 1_000):
                    await noop.batch_defer_async(*[{"text": PAYLOAD, "sent": 0}] * 1_000)

        asyncio.run(body())

    def open(self) -> Callable[[int], object]:
        app, noop = self.app()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(app.open_async())
        return lambda sent: loop.run_until_complete(noop.defer_async(text=PAYLOAD, sent=sent))

    def work(self, variant: str, slot: int) -> None:
        app, _ = self.app()
        self.counter.append(tally(slot))
        logging.disable(logging.ERROR)

        async def body() -> None:
            async with app.open_async():
                await app.run_worker_async(concurrency=int(variant), install_signal_handlers=False)

        asyncio.run(body())


class HueySqlite(System):
    """Threads on a SQLite file, synchronous=OFF by default: not durable."""

    name, database = "huey-sqlite", "sqlite"
    variants = ("1", "2")

    def huey(self) -> Any:
        from huey import SqliteHuey

        return SqliteHuey("bench", filename=str(DIR / "huey.db"), results=False)

    def app(self, slot: int | None = None) -> tuple[Any, Any]:
        huey = self.huey()
        counter = None if slot is None else tally(slot)

        @huey.task(name="noop")
        def noop(text: str, sent: int) -> None:
            if counter is not None:
                counter.hit(sent)

        return huey, noop

    def reset(self) -> None:
        wipe("huey.db")

    def fill(self, n: int) -> None:
        import sqlite3

        self.open()(0)
        with sqlite3.connect(DIR / "huey.db") as connection:
            connection.execute(
                "WITH RECURSIVE g(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM g WHERE i < ?) INSERT INTO task (queue, data, priority) "
                "SELECT queue, data, priority FROM (SELECT * FROM task LIMIT 1), g",
                (n,),
            )

    def open(self) -> Callable[[int], object]:
        _, noop = self.app()
        return lambda sent: noop(PAYLOAD, sent)

    def work(self, variant: str, slot: int) -> None:
        huey, _ = self.app(slot)
        logging.disable(logging.ERROR)
        huey.create_consumer(workers=int(variant), periodic=False, worker_type="thread").run()


class HueyRedis(HueySqlite):
    name, database = "huey-redis", "redis"
    variants = ("4",)

    def huey(self) -> Any:
        from huey import RedisHuey

        return RedisHuey("bench", url=os.environ["BENCH_REDIS"], results=False)

    def reset(self) -> None:
        self.app()[0].flush()

    def fill(self, n: int) -> None:
        send = self.open()
        for _ in range(n):
            send(0)


class CeleryOn(System):
    """`celery worker` without results and events; the variant is the pool."""

    variants = ("prefork2x4", "prefork2x8", "solo")
    """The pool, its children, and the prefetch multiplier."""

    def __init__(self, name: str, database: str, url: str) -> None:
        self.name, self.database, self._url = name, database, url  # type: ignore[misc]

    def app(self, prefetch: int = 4) -> tuple[Any, Any]:
        from celery import Celery

        app = Celery("bench", broker=self._url.format(**os.environ))
        app.conf.update(
            task_ignore_result=True, worker_prefetch_multiplier=prefetch, worker_hijack_root_logger=False,
            task_default_queue="bench", broker_connection_retry_on_startup=True,
        )  # fmt: skip
        counter: list[Tally] = []

        @app.task(name="noop")
        def noop(text: str, sent: int) -> None:
            if not counter:  # a slot for each child
                from billiard import current_process

                number = multiprocessing.current_process().name.rpartition("-")[2]  # of a child of dbqueue worker
                child = int(number) - 1 if number.isdigit() else getattr(current_process(), "index", 0)
                counter.append(tally(1 + child))
            counter[0].hit(sent)

        return app, noop

    def reset(self) -> None:
        if self.database == "postgresql":
            reset_postgres()
        elif self.database == "sqlite":
            wipe("celery.db")
        app, _ = self.app()
        app.control.purge()

    def fill(self, n: int) -> None:
        send = self.open()
        for _ in range(n):
            send(0)

    def open(self) -> Callable[[int], object]:
        _, noop = self.app()
        return lambda sent: noop.delay(PAYLOAD, sent)

    def bulk(self, n: int) -> None:
        """A hundred in each transaction where there are transactions, else one by one."""
        _, noop = self.app()
        if self.database != "postgresql":
            for _ in range(n):
                noop.delay(PAYLOAD, 0)
            return
        import psycopg

        import dbqueue

        with psycopg.connect(PG) as connection:
            for _ in range(n // 100):
                with dbqueue.using(connection):
                    for _ in range(100):
                        noop.delay(PAYLOAD, 0)
                connection.commit()

    def work(self, variant: str, slot: int) -> None:
        children, _, prefetch = variant.removeprefix("prefork").partition("x")
        app, _ = self.app(int(prefetch or 8))
        pool = ["-P", "solo"] if variant == "solo" else ["-P", "prefork", "-c", children]
        app.worker_main(["worker", "-l", "ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat", *pool])


class CeleryWaits(CeleryOn):
    """Celery with results: how long a client waits for one, for a group, and for the body of a chord."""

    variants = ("prefork2x4",)

    def __init__(self, name: str, database: str, broker: str, backend: str, beside: tuple[str, ...] = ()) -> None:
        super().__init__(name, database, broker)
        self._backend, self.beside = backend, beside  # type: ignore[misc]

    def app(self, prefetch: int = 4) -> tuple[Any, Any]:
        app, noop = super().app(prefetch)
        app.conf.update(task_ignore_result=False, result_backend=self._backend.format(**os.environ))

        @app.task(name="total")
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        @app.task(name="echo")
        def echo(number: int) -> int:
            return number

        self.echo, self.total = echo, total
        return app, noop

    def wait(self, gets: int, members: int, parts: int) -> None:
        import celery

        self.app()
        echo, total = self.echo, self.total
        for n in range(30):
            echo.delay(n).get(timeout=60)
        took: list[float] = []
        for n in range(gets):
            began = time.monotonic()
            assert echo.delay(n).get(timeout=60) == n
            took.append(time.monotonic() - began)
        began = time.monotonic()
        assert sum(celery.group(echo.s(n) for n in range(members))().get(timeout=120)) == sum(range(members))
        group = time.monotonic() - began
        began = time.monotonic()
        assert celery.chord([echo.s(n) for n in range(parts)], total.s())().get(timeout=120) == sum(range(parts))
        chord = time.monotonic() - began
        found = sorted(took)
        print(json.dumps({
            "get_ms": round(found[len(found) // 2] * 1e3, 2), "get_p99": round(found[int(len(found) * 0.99)] * 1e3, 2),
            "group_ms": round(group * 1e3, 1), "chord_ms": round(chord * 1e3, 1),
        }))  # fmt: skip


bench_app: Any = None
"""What ``dbqueue worker -A bench.systems:bench_app`` runs."""


class WorkerOnCelery(CeleryOn):
    """`dbqueue worker -A`, which runs the tasks of the same app, without results; the variant is its children or its threads."""

    variants = ("prefork2", "prefork4", "threads16")

    def work(self, variant: str, slot: int) -> None:
        pool = "threads" if variant.startswith("threads") else "processes"
        slots = variant.removeprefix("threads").removeprefix("prefork")
        os.environ["BENCH_APP"] = self.name
        command = ["-m", "dbqueue", "worker", "-A", "bench.systems:bench_app", "-P", pool, "-c", slots, "-l", "error"]
        os.execv(sys.executable, [sys.executable, *command])


class BridgeOn(Dbqueue):
    """Celery's call sites without Celery, on the threads of `dbqueue worker`; the variant is their number."""

    name = "bridge"
    variants = ("16",)

    def queue(self, **options: Any) -> tuple[Any, Any]:
        from celery_bridge import Bridge
        from dbqueue import DBQueue

        queue = DBQueue(self.url(), **options)
        counter: list[Tally] = []
        self.counter = counter

        @Bridge(queue).task(name="noop")
        def noop(text: str, sent: int) -> None:
            counter[0].hit(sent)

        return queue, noop

    def fill(self, n: int) -> None:
        import dbqueue

        queue, noop = self.queue()
        with queue.database.transaction() as session, dbqueue.using(session.connection):
            for _ in range(n):
                noop.delay(PAYLOAD, 0)

    def open(self) -> Callable[[int], object]:
        _, noop = self.queue()
        return lambda sent: noop.delay(PAYLOAD, sent)


class BridgeOnSqlite(BridgeOn, DbqueueSqlite):
    name = "bridge-sqlite"


def connect() -> Any:
    import psycopg

    return psycopg.connect(PG, autocommit=True)


def reset_postgres() -> None:
    with connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


def wipe(name: str) -> None:
    for path in DIR.glob(name + "*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


SYSTEMS: dict[str, System] = {
    s.name: s
    for s in (
        Dbqueue(), DbqueueSqlite(), BridgeOn(), BridgeOnSqlite(), Floor(), PgQueuer(), Procrastinate(), HueySqlite(), HueyRedis(),
        CeleryOn("celery-redis", "redis", "{BENCH_REDIS}"),
        CeleryOn("celery-rabbitmq", "rabbitmq", "{BENCH_AMQP}"),
        CeleryOn("celery-dbqueue", "postgresql", "dbqueue+{BENCH_PG}"),
        CeleryWaits("results-rabbitmq-redis", "rabbitmq", "{BENCH_AMQP}", "{BENCH_REDIS}", ("redis",)),
        CeleryWaits("results-rabbitmq-dbqueue", "postgresql", "{BENCH_AMQP}", "dbqueue+{BENCH_PG}", ("rabbitmq",)),
        CeleryWaits("results-dbqueue", "postgresql", "dbqueue+{BENCH_PG}", "dbqueue+{BENCH_PG}"),
        CeleryWaits("results-db+", "postgresql", "dbqueue+{BENCH_PG}", "db+{BENCH_PG}"),
        CeleryWaits(
            "results-dbqueue-sqlite", "sqlite", "dbqueue+sqlite:///{BENCH_DIR}/celery.db", "dbqueue+sqlite:///{BENCH_DIR}/celery.db"
        ),
        CeleryOn("celery-dbqueue-sqlite", "sqlite", "dbqueue+sqlite:///{BENCH_DIR}/celery.db"),
        WorkerOnCelery("celery-dbqueue-worker", "postgresql", "dbqueue+{BENCH_PG}"),
        WorkerOnCelery("celery-dbqueue-worker-sqlite", "sqlite", "dbqueue+sqlite:///{BENCH_DIR}/celery.db"),
    )
}  # fmt: skip
if "BENCH_APP" in os.environ:
    app_system = SYSTEMS[os.environ["BENCH_APP"]]
    assert isinstance(app_system, CeleryOn)
    bench_app, _ = app_system.app()


def told(n: int, began: float, cpu: float) -> None:
    rate, client_us = n / (time.monotonic() - began), (time.process_time() - cpu) / n * 1e6
    print(json.dumps({"rate": round(rate, 1), "client_us": round(client_us, 1)}))


def main(name: str, what: str, *args: str) -> None:
    system = SYSTEMS[name]
    if what == "reset":
        system.reset()
    elif what == "fill":
        system.fill(int(args[0]))
    elif what == "work":
        system.work(args[0], int(args[1]))
    elif what == "crowd":
        assert isinstance(system, Dbqueue)
        system.crowd(*args)
    elif what == "wait":
        assert isinstance(system, CeleryWaits)
        system.wait(*map(int, args))
    elif what == "one":  # enqueue one by one for some seconds
        send, seconds = system.open(), float(args[0])
        for _ in range(100):
            send(0)
        began, cpu, n = time.monotonic(), time.process_time(), 0
        while time.monotonic() - began < seconds:
            send(0)
            n += 1
        told(n, began, cpu)
    elif what == "bulk":
        system.bulk(1_000)
        began, cpu = time.monotonic(), time.process_time()
        system.bulk(int(args[0]))
        told(int(args[0]), began, cpu)
    elif what == "paced":  # n jobs at intervals that no poll is a multiple of
        send = system.open()
        for n in range(int(args[0])):
            time.sleep(0.031 + 0.0007 * (n % 7))
            send(time.monotonic_ns())


if __name__ == "__main__":
    main(*sys.argv[1:])
