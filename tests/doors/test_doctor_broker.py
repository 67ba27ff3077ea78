"""`dbqueue doctor` on a broker: what dead processes left, a log that nobody shortens, and the files beside a SQLite file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import kombu
import pytest

from dbqueue import DBQueue, routing
from dbqueue.clock import SECOND
from dbqueue.database.tables import Letter
from dbqueue.doctor import broker
from dbqueue.errors import ConnectionLost
from dbqueue.kombu_transport.housekeeping import Housekeeping
from dbqueue.mail import Mail
from dbqueue.routing import Queue
from tests.doors.test_doctor import Look, as_nobody, not_ok
from tests.doors.test_doctor import look as look
from tests.servers import Server
from tests.waiting import wait_for

POSTGRES = pytest.mark.databases("postgres")
SQLITE = pytest.mark.databases("sqlite")


@pytest.fixture
def log(queue: DBQueue) -> Iterator[Mail]:
    log = Mail(queue.database)
    yield log
    log.close()


def consumer(queue: DBQueue, tag: str, name: str, seconds: int) -> None:
    """Its row is good for so long; negative: it died so long ago."""
    database = queue.database
    database.run(lambda s: routing.add_consumer(database.dialect, s, tag, name, "worker", seconds * SECOND))


def post(log: Mail, seconds: int) -> None:
    log.post(Letter("celeryev", "task.sent", b"{}", b"{}", seconds * SECOND, ()))


def sweep(queue: DBQueue, log: Mail) -> None:
    """What every consumer does twice a minute."""
    with queue.database.session() as session:
        Housekeeping(queue.database, log, "another")._sweep(session)


@pytest.mark.req("C1")
def test_consumers_that_died(look: Look, queue: DBQueue, log: Mail) -> None:
    consumer(queue, "a", "mail", 60)
    consumer(queue, "b", "mail", -100)
    found = look()
    assert not_ok(found) == {}, "another consumer is about to see it"
    assert found["consumers"]["sentence"] == "2 consumers of the transport, none of them dead"
    for number in range(2):
        consumer(queue, f"c{number}", "reports", -300)
    found = look()
    assert not_ok(found) == {"consumers": "warning"}
    assert "2 consumers died without a word more than 180 s ago" in found["consumers"]["sentence"]
    assert "(queues: 'reports')" in found["consumers"]["sentence"]
    sweep(queue, log)
    assert not_ok(look()) == {}, "the remedy cures it"


@pytest.mark.req("C1")
def test_queues_that_nobody_deletes(
    look: Look, queue: DBQueue, log: Mail, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    """Of a few, the next consumer makes short work."""
    monkeypatch.setattr(broker, "MANY_QUEUES", 2)
    database = queue.database
    for number in range(3):
        assert not_ok(look()) == {}
        replies = Queue(f"reply.{number}", durable=False, auto_delete=True, expires_ms=10_000)
        database.run(lambda s, replies=replies: routing.declare_queue(database.dialect, s, replies))
        database.run(lambda s: s.execute(database.dialect.portable("UPDATE {queues} SET used_at = 0")))
    found = look()
    assert not_ok(found) == {"consumers": "warning"}
    assert "3 queues have expired or outlived their consumers" in found["consumers"]["sentence"]
    sweep(queue, log)
    assert not_ok(look()) == {}


@pytest.mark.req("C1")
def test_a_log_that_nobody_shortens(look: Look, queue: DBQueue, log: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "MANY_LETTERS", 5)
    for seconds in (60, 60, -100):
        post(log, seconds)
    found = look()
    assert not_ok(found) == {}
    assert found["letters"]["sentence"] == "3 short-lived messages in the log"
    for _ in range(4):
        post(log, 60)
    found = look()
    assert not_ok(found) == {"letters": "warning"}
    assert "holds more than 5 of them" in found["letters"]["sentence"]
    assert "event_queue_ttl" in found["letters"]["remedy"]
    monkeypatch.setattr(broker, "MANY_LETTERS", 100)
    post(log, -300)
    found = look()
    assert not_ok(found) == {"letters": "warning"}
    assert "1 short-lived message expired more than 180 s ago" in found["letters"]["sentence"]
    sweep(queue, log)
    assert not_ok(look()) == {}


@POSTGRES
@pytest.mark.req("C4")
def test_a_log_that_a_crash_emptied_is_none_of_its_findings(
    look: Look, queue: DBQueue, log: Mail, postgres: Server, database_url: str
) -> None:
    """The tables are UNLOGGED: rows and cursors of the short-lived messages are gone, and everything else is there."""
    with kombu.Connection(f"dbqueue+{database_url}") as connection:
        exchange = kombu.Exchange("events", type="fanout", durable=False)
        kombu.Queue("monitor", exchange, durable=False, auto_delete=True)(connection.default_channel).declare()
        kombu.Producer(connection).publish({"n": 1}, exchange="events", delivery_mode=1)
        kombu.Producer(connection).publish({"n": 1}, routing_key="tasks")
    assert look()["letters"]["sentence"] == "1 short-lived message in the log"
    postgres.stop("immediate")
    postgres.start()

    def answered() -> bool:
        try:
            return queue.counts("tasks") == {"pending": 1}
        except ConnectionLost:
            return False

    wait_for(answered, 30)
    with queue.database.session() as session:
        assert session.execute("SELECT count(*) FROM dbqueue_mail, dbqueue_cursors")[0][0] == 0
    found = look()
    assert not_ok(found) == {}
    assert found["letters"]["sentence"] == "0 short-lived messages in the log"


@SQLITE
def test_looking_makes_no_log(look: Look, queue: DBQueue, database_url: str) -> None:
    found = look()
    assert not_ok(found) == {}
    assert found["letters"]["sentence"] == "nobody has used remote control, events or replies yet"
    assert not Path(database_url.removeprefix("sqlite:///") + "-mail").exists()


@SQLITE
def test_files_that_only_the_transport_needs(look: Look) -> None:
    """Whoever may not write to them can enqueue and work all the same, but neither hear nor say anything."""
    with tempfile.TemporaryDirectory() as folder:
        path, log_file = Path(folder) / "queue.db", Path(folder) / "queue.db-mail"
        queue = DBQueue(f"sqlite:///{path}")
        queue.migrate()
        log = Mail(queue.database)
        post(log, 60)
        log.close()
        queue.close()
        log_file.chmod(0o666)
        found = look(url=f"sqlite:///{path}")
        assert not_ok(found) == {"file": "warning"}
        assert f"every user of this machine may write to {log_file}" in found["file"]["sentence"]
        log_file.chmod(0o444)
        path.chmod(0o666)
        Path(folder).chmod(0o777)
        with as_nobody():
            found = look(url=f"sqlite:///{path}")
    assert found["file"]["status"] == "failure"
    assert f"may not write to the file {log_file}" in found["file"]["sentence"]
    assert "every Celery program" in found["file"]["remedy"]
    assert found["letters"]["sentence"] == "1 short-lived message in the log", "the rest is looked at"
