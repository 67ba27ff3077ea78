"""What is written, when it counts, and what must never be in it."""

from __future__ import annotations

import logging
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
import pytest

import dbqueue
from dbqueue import ConnectionLost, DatabaseBusy, DBQueue, InvalidArgument, InvalidPayload, current_job, events
from tests.doors.conftest import Run
from tests.doors.conftest import cli as cli
from tests.doors.conftest import elsewhere as elsewhere
from tests.factory import set_columns
from tests.runtimes.jobs import Jobs, Nap, notes
from tests.runtimes.lab import Process, Told, drained, in_thread, record, wait_state
from tests.servers import Server
from tests.waiting import wait_for

MakeQueue = Callable[..., DBQueue]


@dataclass(frozen=True)
class Text:
    text: str
    more: dict[str, str] | None = None


@contextmanager
def connected(queue: DBQueue) -> Iterator[Any]:
    """A connection of the application's own, in a transaction."""
    url = queue.database.url
    if queue.database.dialect.name == "sqlite":
        connection: Any = sqlite3.connect(str(url.database), timeout=10)
        connection.execute("BEGIN IMMEDIATE")
    else:
        connection = psycopg.connect(url.render_as_string(hide_password=False))
    with closing(connection):
        yield connection


# -- the write itself --------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
@pytest.mark.req("D4")
def test_a_table_that_is_locked_is_told_and_nothing_is_written(
    make_queue: MakeQueue, postgres: Server, queue: DBQueue
) -> None:
    """C17. kombu's SQL transport: a publisher was given an id although its INSERT had failed."""
    name = str(queue.database.url.database)
    postgres.execute(f"ALTER DATABASE {name} SET lock_timeout = '50ms'")
    hurried = make_queue()  # its connections are new

    @hurried.job(max_attempts=1, timeout=20)
    def job() -> None: ...

    with connected(queue) as holder:
        holder.execute("LOCK TABLE dbqueue_jobs IN EXCLUSIVE MODE")
        with pytest.raises(DatabaseBusy):
            job.enqueue()
        holder.rollback()
    assert not any(hurried.counts().values())
    assert record(hurried, job.enqueue().id).state == "pending"


@pytest.mark.req("D3", "D5")
def test_the_id_is_known_before_the_commit_and_is_the_one_that_the_handler_has(queue: DBQueue) -> None:
    """C118. Celery's on-commit helper cannot return the task's id, so nobody can store it in the same transaction."""
    seen: list[UUID] = []

    @queue.job(max_attempts=1, timeout=20)
    def ship() -> None:
        job = current_job()
        assert job is not None
        seen.append(job.id)

    with connected(queue) as connection:
        connection.execute("CREATE TABLE orders (number integer, job text)")
        with dbqueue.using(connection):
            ref = ship.enqueue()
            connection.execute(f"INSERT INTO orders VALUES (1, '{ref.id}')")
        connection.commit()
        ((stored,),) = connection.execute("SELECT job FROM orders").fetchall()
        connection.commit()
    drained(queue, slots=1)
    assert seen == [UUID(stored)] == [ref.id]
    assert record(queue, UUID(stored)).state == "succeeded"


@pytest.mark.databases("postgres")
@pytest.mark.req("D5")
def test_two_phase_commit(make_server: Callable[..., Server]) -> None:
    """C120. pq: a transaction that has executed NOTIFY cannot be prepared. With ``notify=False`` none is executed, and the poll
    serves."""
    server = make_server(18, max_prepared_transactions="4")
    url = server.dsn(server.create_database())
    ran: list[str] = []

    def declare(**options: Any) -> DBQueue:
        queue = DBQueue(url, **options)
        queue.job(max_attempts=1, timeout=20, name="job")(job)
        queue.database.ready()
        return queue

    def job(text: Text) -> None:
        ran.append(text.text)

    def write(queue: DBQueue, text: str, end: Callable[[Any], None]) -> None:
        with closing(psycopg.connect(url)) as connection:
            connection.tpc_begin(connection.xid(1, text, "shop"))
            with dbqueue.using(connection):
                queue.targets["job"].enqueue(Text(text))
            connection.tpc_prepare()
            assert text not in ran
            end(connection)

    quiet, loud = declare(notify=False, poll=0.1), declare(poll=30)
    write(loud, "nobody sleeps", lambda connection: connection.tpc_commit())
    drained(loud, slots=1)
    with in_thread(loud, slots=1) as running, in_thread(quiet, slots=1):
        running.asleep()
        with pytest.raises(psycopg.Error, match="PREPARE"):
            write(loud, "refused", lambda connection: None)
        write(quiet, "kept", lambda connection: connection.tpc_commit())
        write(quiet, "dropped", lambda connection: connection.tpc_rollback())
        wait_state(quiet, quiet.targets["job"].enqueue(Text("last")).id, "succeeded")
        wait_for(lambda: sorted(ran) == ["kept", "last", "nobody sleeps"])
    quiet.close()
    loud.close()


# -- what is in it -----------------------------------------------------------------------------------------------------


@pytest.mark.req("D2", "D3")
def test_awkward_characters_come_back_or_are_refused_before_anything_is_written(queue: DBQueue) -> None:
    """C97. Awa, Kestra: a NUL or a lone surrogate in the arguments, which JSONB refuses: an obscure error, or a lost message. The
    caller's transaction survives the refusal."""
    ran: list[Text] = []

    @queue.job(max_attempts=1, timeout=20)
    def job(text: Text) -> None:
        ran.append(text)

    good = [
        Text(word, {word: word}) for word in ("a\0b", "\0", "\U0001f600", "\u2028", "'\"\\", "\ufeff", "\x7f\x1b[2J")
    ]
    with connected(queue) as connection, dbqueue.using(connection):
        for text in good:
            job.enqueue(text)
        refused: list[Callable[[], object]] = [
            lambda: job.enqueue(Text("\ud800")),
            lambda: job.enqueue(Text("x", {"\udfff": "x"})),
            lambda: job.enqueue_many([Text("x"), Text("\ud800")]),
            lambda: job.enqueue(Text("x"), key="a\0b"),
            lambda: job.enqueue(Text("x"), key="\ud800"),
            lambda: queue.send("raw", {"x": "\ud800"}),
        ]
        for call in refused:
            with pytest.raises((InvalidPayload, InvalidArgument)):
                call()
        connection.commit()
    drained(queue, slots=1)
    assert ran == good
    assert {state: n for state, n in queue.counts().items() if n} == {"succeeded": len(good)}


@pytest.mark.databases("postgres")
@pytest.mark.req("D5")
def test_a_payload_of_any_size_wakes_a_sleeping_worker(make_queue: MakeQueue) -> None:
    """C99. AWX, odd-jobs, Oban: the payload travelled in the notification, so enqueueing failed above 8,000 bytes."""
    queue = make_queue(poll=30)
    lengths: list[int] = []

    @queue.job(max_attempts=1, timeout=20, queue="q" * 200)
    def job(text: Text) -> None:
        lengths.append(len(text.text))

    with in_thread(queue, slots=1) as running:
        for size in (7_900, 8_100, 100_000, 1_040_000):
            running.asleep()
            wait_state(queue, job.enqueue(Text("x" * size)).id, "succeeded")
        with pytest.raises(InvalidPayload, match="limit"):
            job.enqueue(Text("x" * 1_050_000))
    assert lengths == [7_900, 8_100, 100_000, 1_040_000]


class Boom:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.req("D9", "D10")
def test_nothing_is_ever_unpickled(jobs: Jobs, tmp_path: Path, cli: Run) -> None:
    """C140. Celery: whoever can write a message can have the worker unpickle it. Here neither worker nor tools do."""
    file = tmp_path / "boom"
    payload = pickle.dumps(Boom(file))
    pickle.loads(payload)
    assert file.exists(), "the trap works"
    file.unlink()
    bad, good = jobs.quick.enqueue(Nap(), priority=9).id, jobs.quick.enqueue(Nap()).id
    set_columns(jobs.queue.database, bad.bytes, payload=payload)
    drained(jobs.queue, slots=1, lease=60)
    found = record(jobs.queue, bad)
    assert (found.state, found.error_kind) == ("blocked", "corrupt_payload")
    assert record(jobs.queue, good).state == "succeeded"
    url = jobs.queue.database.url.render_as_string(hide_password=False)
    assert cli("jobs", "show", bad, "--payload", "--url", url).code == 0
    assert cli("jobs", "retry", bad, "--url", url).code == 0
    drained(jobs.queue, slots=1, lease=60)
    assert record(jobs.queue, bad).state == "blocked"
    assert not file.exists()


# -- when it counts ----------------------------------------------------------------------------------------------------


@pytest.mark.req("D3", "H14")
def test_an_instant_is_the_same_in_every_zone_and_under_every_tz(
    jobs: Jobs, start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C122. Celery: naive datetimes were read in another zone, so tasks ran hours late. Here they are refused, and an aware one is
    one instant, whatever zone it names and whatever TZ a process has."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    start("-c", 4, "--lease", 60).started()
    at = datetime.now(timezone.utc) + timedelta(seconds=0.5)
    zones = ("UTC", "Europe/Amsterdam", "Asia/Tokyo", "America/St_Johns")
    refs = [jobs.quick.enqueue_at(at.astimezone(ZoneInfo(zone)), Nap()).id for zone in zones]
    for naive in (datetime.now(), datetime.utcnow()):  # noqa: DTZ003, DTZ005
        with pytest.raises(InvalidArgument, match="aware"):
            jobs.quick.enqueue(Nap(), run_at=naive)
    for ref in refs:
        found = wait_state(jobs.queue, ref, "succeeded")
        assert abs(found.run_at - at) < timedelta(milliseconds=1)
        assert found.started_at is not None
        assert timedelta(0) <= found.started_at - found.run_at < timedelta(seconds=2)
    assert len(notes(jobs.folder, "start")) == len(zones)


# -- passwords ---------------------------------------------------------------------------------------------------------


@pytest.mark.databases("postgres")
@pytest.mark.req("D10")
def test_a_password_of_awkward_characters_works_and_is_never_told(
    queue: DBQueue, postgres: Server, told: Told, cli: Run, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """C139. Celery, kombu: the broker's password was printed in banners, reports and errors."""
    password = "s3cr3t@:/%ü'\\ x"
    quoted = password.replace("'", "''").replace("%", "%%")
    postgres.execute(f"CREATE ROLE shop LOGIN SUPERUSER PASSWORD '{quoted}'")
    where = f"127.0.0.1:{postgres.port}/{queue.database.url.database}"
    urls = [
        f"postgresql://shop:{quote(password, safe='')}@{where}",
        f"postgresql://shop@{where}?password={quote(password)}",
    ]
    wrong = [f"postgresql://shop:{quote(password + 'x', safe='')}@{where}", urls[0].replace(where, "127.0.0.1:1/x")]
    texts: list[str] = []
    try:
        with caplog.at_level(logging.DEBUG):
            for url in urls:
                own = DBQueue(url)
                own.job(max_attempts=1, timeout=20, name="job")(nothing)
                wanted = own.targets["job"].enqueue().id
                drained(own, slots=1)
                assert record(own, wanted).state == "succeeded"
                texts += [repr(own), repr(own.settings), repr(own.database), str(own.database.label)]
                own.close()
                for command in (("queues",), ("doctor",), ("jobs", "list"), ("migrate", "--dry-run")):
                    answer = cli(*command, "--url", url)
                    assert answer.code in (0, 1), answer
                    texts += [answer.out, answer.err]
            for url in wrong:
                own = DBQueue(url)
                with pytest.raises(ConnectionLost) as caught:
                    own.counts()
                texts += [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
                answer = cli("queues", "--traceback", "--url", url)
                assert answer.code == 3
                texts += [answer.out, answer.err]
                own.close()
            process = Process(urls[0], tmp_path, "--once", "-l", "debug")
            assert process.ended() == 0
            texts += [process.log, caplog.text, repr(told.of(events.WorkerStarted))]
    finally:
        postgres.execute("DROP ROLE shop")
    assert " on postgresql://shop:***@" in process.log
    for text in texts:
        assert "s3cr3t" not in text


def nothing() -> None: ...
