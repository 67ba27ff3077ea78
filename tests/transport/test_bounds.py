"""What the queues of remote control cost while others are busy, and what is left of messages when their queue is emptied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kombu
import pytest

from dbqueue import DBQueue, QueueError, mail, routing
from dbqueue.clock import SECOND
from dbqueue.database.tables import Letter
from dbqueue.kombu_transport.housekeeping import Housekeeping
from dbqueue.mail import Mail

pytestmark = pytest.mark.req("C1")

Connect = Callable[..., kombu.Connection]

QUIET, BUSY = ("quiet", "fanout", ""), ("busy", "fanout", "")


@pytest.fixture
def log(queue: DBQueue) -> Iterator[Mail]:
    log = Mail(queue.database)
    yield log
    log.close()


def post(log: Mail, exchange: str, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        log.post(Letter(exchange, "", b"{}", str(number).encode(), 60 * SECOND, ()))


def cursor(log: Mail, name: str) -> int:
    with log._session() as session:
        return int(session.execute(f"SELECT position FROM dbqueue_cursors WHERE queue = '{name}'")[0][0])


def bodies(log: Mail, name: str, binding: Any, limit: int) -> list[int]:
    return [int(item.payload) for item in log.read(name, [binding], limit)]


def test_a_cursor_moves_past_what_is_not_for_its_queue(log: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each look of a worker's control queue would read all events of the last minutes. A few are not worth a write."""
    monkeypatch.setattr(mail, "SKIPPED", 20)
    log.open("q")
    began = cursor(log, "q")
    post(log, "busy", 19)
    assert bodies(log, "q", QUIET, 10) == []
    assert cursor(log, "q") == began
    post(log, "busy", 1)
    assert bodies(log, "q", QUIET, 10) == []
    assert cursor(log, "q") == began + 20
    post(log, "quiet", 2)
    post(log, "busy", 25)
    assert bodies(log, "q", QUIET, 10) == [0, 1]
    assert cursor(log, "q") == began + 47
    post(log, "quiet", 1, 2)
    assert bodies(log, "q", QUIET, 10) == [2]


@pytest.mark.parametrize("limit", [7, 100])
def test_what_is_cut_from_a_batch_is_read_next(log: Mail, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(mail, "BATCH", 30)
    monkeypatch.setattr(mail, "SKIPPED", 5)
    log.open("q")
    for number in range(50):
        post(log, "busy", 1, number)
        post(log, "quiet", 3)
    got: list[int] = []
    while more := bodies(log, "q", BUSY, limit):
        assert len(more) <= limit
        got += more
    assert got == list(range(50))


def test_purging_and_deleting_take_all_messages(
    connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claimable ones and those of a later time, in several steps; neither another queue's nor jobs that are no messages."""
    monkeypatch.setattr(routing, "FIRST", 2)
    monkeypatch.setattr(routing, "BATCH", 3)
    channel = connect().channel()
    producer = kombu.Producer(channel)
    for name in ("q", "other"):
        kombu.Queue(name, routing_key=name)(channel).declare()
    later = {"task": "t", "id": "i", "eta": "2999-01-01T00:00:00+00:00"}
    for take in (channel.queue_purge, channel.queue_delete):
        for name, count in (("q", 8), ("other", 1)):
            for number in range(count):
                producer.publish(number, routing_key=name, headers={"task": "t", "id": str(number)})
                producer.publish(number, routing_key=name, headers=later)
        job = queue.send("q", {})
        assert take("q") == 16
        assert queue.counts("q")["pending"] == 1
        queue.cancel(job.id)
        assert take("other") == 2


def refuse(queue: DBQueue, what: str, table: str, condition: str) -> Callable[[], None]:
    """From now on the database refuses to write such a row; returns what ends that."""
    postgres = queue.database.dialect.name == "postgresql"
    with queue.database.session() as session:
        if postgres:
            session.execute(
                "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$"
            )
            session.execute(
                f"CREATE TRIGGER no BEFORE {what} ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION no()"
            )
        else:
            session.execute(
                f"CREATE TRIGGER no BEFORE {what} ON {table} WHEN {condition} BEGIN SELECT RAISE(ABORT, 'no'); END"
            )

    def end() -> None:
        with queue.database.session() as session:
            session.execute(f"DROP TRIGGER no ON {table}" if postgres else "DROP TRIGGER no")

    return end


@pytest.mark.parametrize("take", ["queue_purge", "queue_delete"])
def test_a_long_queue_goes_in_many_transactions(
    connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch, take: str
) -> None:
    """The one that fails takes nothing with it that was gone before; nor would it hold anybody up for all of them."""
    monkeypatch.setattr(routing, "FIRST", 2)
    monkeypatch.setattr(routing, "BATCH", 3)
    channel = connect().channel()
    channel.queue_declare("q")
    for number in range(10):
        kombu.Producer(channel).publish(number, routing_key="q", headers={"task": "t", "id": f"t{number}"})
    end = refuse(queue, "DELETE", "dbqueue_jobs", "OLD.task_id = 't6'")
    with pytest.raises(QueueError):
        getattr(channel, take)("q")
    assert queue.counts("q") == {"pending": 5}
    end()
    assert getattr(channel, take)("q") == 5
    assert queue.counts("q") == {}


def test_an_abandoned_queue_goes_in_many_transactions(
    connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "FIRST", 2)
    monkeypatch.setattr(routing, "BATCH", 3)
    connection = connect()
    channel = connection.channel()
    channel.queue_declare("q", arguments={"x-expires": 1_000})
    for number in range(10):
        kombu.Producer(channel).publish(number, routing_key="q", headers={"task": "t", "id": f"t{number}"})
    end = refuse(queue, "DELETE", "dbqueue_jobs", "OLD.task_id = 't6'")
    database = queue.database
    database.clock.advance(60)
    log = Mail(database)
    house = Housekeeping(database, log, "w")
    for left in (5, 0):
        with database.session() as session:
            if left:
                with pytest.raises(Exception, match="no"):
                    house._sweep(session)
            else:
                house._sweep(session)
        assert queue.counts("q").get("pending", 0) == left
        assert (routing_of(queue, "q") is None) == (not left)
        if left:
            end()
    log.close()


def routing_of(queue: DBQueue, name: str) -> routing.Route | None:
    return queue.database.read(lambda session: routing.find_queue(queue.database.dialect, session, name))


def test_letters_that_expired_go_in_batches(log: Mail, queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else goes: neither a letter behind them, nor one between them that lives longer."""
    monkeypatch.setattr(mail, "PRUNED", 3)
    log.open("q")
    for number in range(20):
        ttl = 3_600 if number in (4, 19) else 60
        log.post(Letter("busy", "", b"{}", str(number).encode(), ttl * SECOND, ()))
    log.prune()
    queue.database.clock.advance(61)
    with monkeypatch.context() as patch:
        sessions: list[None] = []
        session_of = log._session
        patch.setattr(log, "_session", lambda given=None: sessions.append(None) or session_of(given))
        log.prune()
    assert len(sessions) == 7
    with log._session() as session:
        left = [int(bytes(row[0])) for row in session.execute("SELECT payload FROM dbqueue_mail ORDER BY id")]
    assert left == [4, 19]


@pytest.mark.databases("postgres")
@pytest.mark.req("C4")
def test_purging_waits_for_nobody_and_leaves_what_is_being_claimed(connect: Connect, queue: DBQueue) -> None:
    """Two that purge one queue would wait for each other's rows, and one that waits for a claim would delete what a consumer has got."""
    channel = connect().channel()
    channel.queue_declare("q")
    for number in range(2):
        kombu.Producer(channel).publish(number, routing_key="q")
    claim = "UPDATE dbqueue_jobs SET state = 1, token = id, lease_until = run_at + 60000000, ready_at = NULL WHERE payload = '0'"
    with queue.database.session() as claiming:
        claiming.begin()
        claiming.execute(claim)
        assert channel.queue_purge("q") == 1
        claiming.commit()
    assert queue.counts("q") == {"running": 1}


def test_a_declaration_counts_what_is_ready_and_stops_counting(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbqueue.kombu_transport import publishing

    monkeypatch.setattr(publishing, "COUNTED", 3)
    channel = connect().channel()
    channel.queue_declare("q")
    producer = kombu.Producer(channel)
    producer.publish(0, routing_key="q", headers={"task": "t", "id": "i", "eta": "2999-01-01T00:00:00+00:00"})
    for number in range(2):
        producer.publish(number, routing_key="q")
    assert channel.queue_declare("q").message_count == 2
    assert channel.queue_declare("q", passive=True).message_count == 3
    for number in range(5):
        producer.publish(number, routing_key="q")
    assert channel.queue_declare("q").message_count == 3
    assert channel.queue_declare("q", passive=True).message_count == 8
