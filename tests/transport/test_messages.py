"""Plain kombu on the transport: what is published arrives as it was, where it should, in its order, and ends as it was told to."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import kombu
import kombu.common
import kombu.pidbox
import pytest
from amqp.exceptions import ChannelError
from celery import Celery
from kombu.simple import SimpleQueue

from dbqueue import DBQueue
from dbqueue.database.engine import Database
from dbqueue.database.tables import Letter
from dbqueue.kombu_transport import housekeeping, options
from dbqueue.mail import Item, Mail
from dbqueue.routing import matches
from tests.factory import opened
from tests.waiting import wait_for

Connect = Callable[..., kombu.Connection]

pytestmark = pytest.mark.req("C3")


def publish(channel: Any, body: Any, routing_key: str = "q", exchange: str = "", **options: Any) -> None:
    kombu.Producer(channel).publish(body, exchange=exchange, routing_key=routing_key, **options)


def declared(channel: Any, name: str = "q", **options: Any) -> Any:
    queue = kombu.Queue(name, routing_key=name, **options)(channel)
    queue.declare()
    return queue


def drained(connection: kombu.Connection, queue: Any, count: int, *, prefetch: int = 0, **options: Any) -> list[Any]:
    """The first messages that a consumer gets; none is acked."""
    got: list[Any] = []
    consumer = kombu.Consumer(connection, [queue], on_message=got.append, prefetch_count=prefetch or None, **options)
    with consumer:
        while len(got) < count:
            connection.drain_events(timeout=10)
    return got


@contextmanager
def nothing_comes(connection: kombu.Connection, queue: Any, seconds: float = 0.3) -> Iterator[None]:
    def refuse(message: Any) -> None:
        raise AssertionError(f"{message!r} came")

    yield
    with kombu.Consumer(connection, [queue], on_message=refuse), pytest.raises(socket.timeout):
        connection.drain_events(timeout=seconds)


# -- what a message carries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"\x00\xff raw", "text \u00e9", b"", "x" * 300_000])
def test_a_body_arrives_as_it_was(connect: Connect, body: Any) -> None:
    channel = connect().channel()
    declared(channel)
    headers = {"k": "v", "nested": {"n": [1, None, True]}, "when": datetime(2030, 1, 2, tzinfo=timezone.utc)}
    publish(
        channel,
        body,
        headers=headers,
        correlation_id="c-1",
        reply_to="r",
        priority=3,
        content_type="x/y",
        content_encoding="utf-8",
    )
    message = channel.basic_get("q")
    assert bytes(message.body) == (body.encode() if isinstance(body, str) else body)
    assert message.headers == headers
    assert (message.content_type, message.properties["correlation_id"], message.properties["reply_to"]) == (
        "x/y",
        "c-1",
        "r",
    )
    assert message.delivery_info["exchange"] == ""
    assert message.delivery_info["routing_key"] == "q"
    assert message.delivery_info["priority"] == 3
    assert message.delivery_info["redelivered"] is False


def test_the_body_is_stored_as_it_is(connect: Connect, queue: DBQueue) -> None:
    channel = connect().channel()
    publish(
        channel, b"\x01\x02", headers={"id": "t-1", "task": "shop.add"}, content_type="x", content_encoding="binary"
    )
    record = queue.jobs(state="pending")[0]
    assert (record.target, record.task_id, record.queue) == ("dbqueue.message.shop.add", "t-1", "q")
    stored = queue.get_job(record.id, with_payload=True)
    assert stored is not None
    assert stored.payload == b"\x01\x02"


def test_a_native_job_in_the_queue_is_no_message(connect: Connect, queue: DBQueue) -> None:
    channel = connect().channel()
    job = queue.send("q", {"n": 1})
    assert channel.basic_get("q") is None
    assert wait_for(lambda: (record := queue.get_job(job.id)) and record.state == "blocked", 10)
    queue.send("q", {"n": 2})
    assert channel.queue_purge("q") == 0


# -- exchanges and queues ----------------------------------------------------------------------------------------------


def test_exchanges_route_by_their_type(connect: Connect) -> None:
    one, other = connect().channel(), connect().channel()
    for kind, keys in (("direct", ["a", "b"]), ("topic", ["a.#", "*.b"]), ("fanout", ["", ""])):
        exchange = kombu.Exchange(kind, type=kind)
        for number, key in enumerate(keys):
            kombu.Queue(f"{kind}{number}", exchange, routing_key=key)(one).declare()
    for kind, key, expected in (
        ("direct", "a", [1, 0]), ("direct", "c", [0, 0]), ("topic", "a.b", [1, 1]), ("topic", "x.b", [0, 1]), ("topic", "a", [1, 0]),
        ("fanout", "whatever", [1, 1]),
    ):  # fmt: skip
        publish(other, {"n": 1}, key, kind)
        assert [one.queue_purge(f"{kind}{n}") for n in (0, 1)] == expected, (kind, key)


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("a.b", "a.b", True), ("a.*", "a.b", True), ("a.*", "a", False), ("a.*", "a.b.c", False), ("a.#", "a", True),
        ("a.#", "a.b.c", True), ("#", "", True), ("#", "a.b", True), ("#.z", "z", True), ("#.z", "a.b.z", True),
        ("#.z", "az", False), ("a.#.z", "a.z", True), ("a.#.z", "a.b.c.z", True), ("*.*", "a", False), ("a.b", "axb", False),
    ],
)  # fmt: skip
def test_topic_patterns(pattern: str, key: str, expected: bool) -> None:
    assert matches("topic", pattern, key) is expected


def test_an_unbound_queue_gets_nothing_more(connect: Connect) -> None:
    channel = connect().channel()
    exchange = kombu.Exchange("e", type="direct")
    queue = kombu.Queue("q", exchange, routing_key="k")(channel)
    queue.declare()
    queue.unbind_from(exchange, "k")
    publish(channel, 1, "k", "e")
    assert queue.queue_declare(passive=True).message_count == 0


def test_passive_declarations(connect: Connect) -> None:
    channel = connect().channel()
    for call in (channel.queue_declare, channel.exchange_declare):
        with pytest.raises(ChannelError, match="NOT_FOUND") as caught:
            call("missing", passive=True)
        assert caught.value.reply_code == 404
    declared(channel)
    publish(channel, 1)
    assert channel.queue_declare("q", passive=True).message_count == 1
    channel.exchange_declare("e", type="fanout")
    channel.exchange_declare("e", passive=True)
    with pytest.raises(ChannelError, match="PRECONDITION"):
        channel.exchange_declare("e", type="direct")


def test_consumers_are_counted_and_a_queue_in_use_is_kept(connect: Connect) -> None:
    one, other = connect(), connect()
    queue = declared(one.default_channel)
    with kombu.Consumer(one, [queue]), kombu.Consumer(other, [queue]):
        assert other.default_channel.queue_declare("q", passive=True).consumer_count == 2
        other.default_channel.queue_delete("q", if_unused=True)
        assert other.default_channel.queue_declare("q", passive=True).consumer_count == 2
    assert other.default_channel.queue_declare("q", passive=True).consumer_count == 0
    publish(other.default_channel, 1)
    other.default_channel.queue_delete("q", if_empty=True)
    assert other.default_channel.queue_declare("q", passive=True).message_count == 1
    assert other.default_channel.queue_delete("q") == 1
    with pytest.raises(ChannelError):
        other.default_channel.queue_declare("q", passive=True)


def test_an_auto_delete_queue_goes_with_its_last_consumer(connect: Connect) -> None:
    one, other = connect(), connect()
    queue = kombu.Queue("q", kombu.Exchange("e", type="fanout"), auto_delete=True)(one.default_channel)
    queue.declare()
    first, second = kombu.Consumer(one, [queue], no_ack=True), kombu.Consumer(other, [queue], no_ack=True)
    first.consume()
    second.consume()
    first.cancel()
    assert other.default_channel.queue_declare("q", passive=True).consumer_count == 1
    second.cancel()
    with pytest.raises(ChannelError):
        other.default_channel.queue_declare("q", passive=True)
    assert other.default_channel.list_bindings() == []


def test_queues_that_nobody_uses_expire(connect: Connect, broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "SWEEP_EVERY", 0.05)
    connection = connect(poll=0.05)
    channel = connection.default_channel
    kept = declared(channel, "kept", expires=0.2)
    declared(channel, "gone", expires=0.2)
    with kombu.Consumer(connection, [kept]):
        wait_for(lambda: not channel._has_queue("gone"), 10, "the queue did not expire")
        assert channel._has_queue("kept")
    wait_for(lambda: drained_nothing(connection) and not channel._has_queue("kept"), 10, "the other did not expire")


def drained_nothing(connection: kombu.Connection) -> bool:
    """A consumer of something else keeps the connection's thread at work."""
    other = declared(connection.default_channel, "other")
    with kombu.Consumer(connection, [other]), pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.2)
    return True


# -- delivering --------------------------------------------------------------------------------------------------------


def test_short_lived_messages_come_one_with_each_drain(connect: Connect) -> None:
    """Whoever wants replies of two workers drains twice, and would wait for nothing if both came with the first."""
    connection = connect()
    channel = connection.default_channel
    queue = kombu.Queue("replies", durable=False, auto_delete=True, exclusive=True, channel=channel)
    queue.declare()
    got: list[Any] = []
    with kombu.Consumer(connection, [queue], on_message=got.append, no_ack=True):
        for n in range(3):
            connection.Producer().publish({"n": n}, routing_key="replies", delivery_mode=1)
        for n in range(3):
            connection.drain_events(timeout=10)
            assert [message.payload["n"] for message in got] == list(range(n + 1))


def test_a_consumer_waits_for_what_another_process_publishes(connect: Connect, broker_url: str) -> None:
    """Not for a poll: the producer rings, on SQLite the file's version changes."""
    connection = connect(poll=30)
    queue = declared(connection.default_channel)
    got: list[Any] = []
    with (
        kombu.Consumer(connection, [queue], on_message=got.append, no_ack=True),
        opened(broker_url.removeprefix("dbqueue+")) as database,
    ):
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=0.5)
        _copy_of_a_message(connection, database)
        began = time.monotonic()
        connection.drain_events(timeout=20)
    assert len(got) == 1
    assert time.monotonic() - began < 5


def _copy_of_a_message(connection: kombu.Connection, database: Database) -> None:
    """Written by another pool than the transport's own."""
    from dbqueue.kombu_transport import message as messages

    message = connection.default_channel.prepare_message("1", content_type="application/json", content_encoding="utf-8")
    job = messages.job_of(
        message, "q", messages.head_of(message, "", "q"), b"1", queue_ttl_ms=None, eta_lead=0, redis=False
    )
    database.run(lambda session: database.dialect.enqueue(session, job))


def test_prefetch_is_the_most_that_is_in_a_consumers_hands(connect: Connect, queue: DBQueue) -> None:
    connection = connect()
    target = declared(connection.default_channel)
    for n in range(5):
        publish(connection.default_channel, n)
    got: list[Any] = []
    with kombu.Consumer(connection, [target], on_message=got.append, prefetch_count=2):
        while len(got) < 2:
            connection.drain_events(timeout=10)
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=0.3)
        assert queue.counts("q") == {"pending": 3, "running": 2}
        got[0].ack()
        connection.drain_events(timeout=10)
        assert [message.payload for message in got] == [0, 1, 2]


@pytest.mark.parametrize(("order", "expected"), [("amqp", [9, 5, 5, 0]), ("redis", [0, 5, 5, 9])])
def test_priorities(connect: Connect, order: str, expected: list[int]) -> None:
    connection = connect(priority_order=order)
    target = declared(connection.default_channel, max_priority=10)
    for priority in (5, 0, 9, 5):
        publish(connection.default_channel, {"p": priority}, priority=priority)
    assert [message.payload["p"] for message in drained(connection, target, 4)] == expected


def test_an_ack_ends_a_message_and_a_reject_keeps_it_as_dead(connect: Connect, queue: DBQueue) -> None:
    connection = connect()
    target = declared(connection.default_channel)
    for n in range(2):
        publish(connection.default_channel, n)
    first, second = drained(connection, target, 2)
    # The consumer was cancelled; what it had is still in our hands.
    first.ack()
    second.reject()
    wait_for(lambda: queue.counts("q") == {"acked": 1, "dead": 1}, 10)
    assert queue.jobs(state="dead")[0].error_kind == "rejected"


def test_a_requeued_message_comes_first_again_and_says_so(connect: Connect) -> None:
    connection = connect()
    channel = connection.default_channel
    declared(channel)
    for n in range(3):
        publish(channel, n)
    first = channel.basic_get("q")
    first.requeue()
    again = channel.basic_get("q")
    assert (again.payload, again.delivery_info["redelivered"]) == (0, True)
    assert channel.basic_get("q").payload == 1


def test_a_message_that_is_requeued_again_and_again_waits(connect: Connect, queue: DBQueue) -> None:
    channel = connect().channel()
    declared(channel)
    publish(channel, 1)
    for _ in range(3):
        message = channel.basic_get("q")
        assert message is not None
        message.requeue()
    assert channel.basic_get("q") is None
    record = queue.jobs(state="pending")[0]
    assert record.run_at > record.updated_at


def test_what_a_closed_channel_had_goes_back(connect: Connect, queue: DBQueue) -> None:
    connection = connect()
    channel = connection.channel()
    declared(channel)
    for n in range(2):
        publish(channel, n)
    delivered = channel.basic_get("q")
    channel.close()
    wait_for(lambda: queue.counts("q") == {"pending": 2}, 10)
    again = connection.channel().basic_get("q")
    assert (again.payload, again.delivery_info["redelivered"]) == (delivered.payload, True)


def test_no_ack_messages_need_none(connect: Connect, queue: DBQueue) -> None:
    connection = connect()
    target = declared(connection.default_channel)
    publish(connection.default_channel, 1)
    drained(connection, target, 1, no_ack=True)
    wait_for(lambda: queue.counts("q") == {"acked": 1}, 10)


def test_recover_brings_back_what_was_delivered(connect: Connect) -> None:
    channel = connect().channel()
    declared(channel)
    publish(channel, 1)
    channel.basic_get("q")
    channel.basic_recover(requeue=True)
    assert channel.basic_get("q").delivery_info["redelivered"] is True


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False], ids=["job", "letter"])
def test_a_message_expires(connect: Connect, durable: bool) -> None:
    connection = connect()
    with connection.SimpleQueue("q") if durable else connection.SimpleBuffer("q") as simple:
        assert isinstance(simple, SimpleQueue)
        simple.put({"n": 1}, expiration=0.05)
        simple.put({"n": 2})
        wait_for(lambda: simple.qsize() == 1, 10)
        assert simple.get(timeout=10).payload == {"n": 2}


def test_what_expired_is_cleared_away(
    connect: Connect, app: Celery, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, where nobody is to be told of it. That a task's own ``expires`` ended it is told by the worker that comes upon it, for an
    hour; meanwhile it is in nobody's way."""
    monkeypatch.setattr(housekeeping, "EXPIRED_BATCH", 2)
    declared(connect().default_channel)
    told = [app.send_task("b", expires=1).id for _ in range(5)]
    plain = app.send_task("a", expiration=2, headers={"expires": None}).id
    queue.database.clock.advance(3_590)
    log = Mail(queue.database)
    house = housekeeping.Housekeeping(queue.database, log, "w")
    for ended in ([plain], [plain, *told]):
        house._sweep_at = 0.0
        with queue.database.session() as session:
            while house._sweep_at == 0.0:
                house.run(session, time.monotonic())
        assert sorted(str(record.task_id) for record in queue.jobs(state="cancelled")) == sorted(ended)
        queue.database.clock.advance(20)
    log.close()


def test_a_queue_gives_its_messages_a_time_to_live(connect: Connect, queue: DBQueue) -> None:
    channel = connect().channel()
    declared(channel, message_ttl=0.05)
    publish(channel, 1)
    wait_for(lambda: channel.queue_declare("q", passive=True).message_count == 0, 10)
    assert channel.basic_get("q") is None
    wait_for(lambda: queue.counts("q") == {"cancelled": 1}, 10)
    assert queue.jobs(state="cancelled")[0].error_kind == "expired"


def test_an_eta_waits_in_the_database(connect: Connect, queue: DBQueue) -> None:
    connection = connect(eta_lead=10)
    channel = connection.default_channel
    target = declared(channel)
    now = datetime.now(timezone.utc)
    for name, seconds in (("far", 60), ("near", 5)):
        publish(channel, name, headers={"eta": (now + timedelta(seconds=seconds)).isoformat()})
    assert [message.payload for message in drained(connection, target, 1)] == ["near"]
    with nothing_comes(connection, target):
        pass
    far = next(record for record in queue.jobs(queue="q") if record.state == "pending")
    assert abs((far.run_at - now).total_seconds() - 50) < 2


# -- the log of short-lived messages -----------------------------------------------------------------------------------


def brief(channel: Any, name: str, exchange: str = "e") -> Any:
    queue = kombu.Queue(name, kombu.Exchange(exchange, type="fanout", durable=False), durable=False, auto_delete=True)(
        channel
    )
    queue.declare()
    return queue


def test_transient_messages_to_auto_delete_queues_are_no_jobs(connect: Connect, queue: DBQueue) -> None:
    connection = connect()
    one, other = brief(connection.default_channel, "one"), brief(connection.default_channel, "other")
    for n in range(3):
        publish(connection.default_channel, n, "", "e", delivery_mode=1)
    assert queue.counts() == {}
    assert [m.payload for m in drained(connection, one, 3, no_ack=True)] == [0, 1, 2]
    assert [m.payload for m in drained(connection, other, 3, no_ack=True)] == [0, 1, 2]


def test_persistent_messages_to_durable_auto_delete_queues_are_jobs(connect: Connect, queue: DBQueue) -> None:
    """What Celery's users know as Broadcast."""
    connection = connect()
    target = kombu.common.Broadcast("b")(connection.default_channel)
    target.declare()
    publish(connection.default_channel, 1, "", "b")
    assert queue.counts(target.name) == {"pending": 1}
    assert target.queue_declare(passive=True).message_count == 1  # and no letter beside it
    assert drained(connection, target, 1)[0].payload == 1


def test_two_consumers_of_one_queue_share_its_letters(connect: Connect) -> None:
    one, other = connect(), connect()
    target = brief(one.default_channel, "q")
    got: list[int] = []
    consumers = [
        kombu.Consumer(c, [target], on_message=lambda m: got.append(m.payload), no_ack=True) for c in (one, other)
    ]
    with consumers[0], consumers[1]:
        for n in range(50):
            publish(one.default_channel, n, "", "e", delivery_mode=1)

        def drain() -> bool:
            for connection in (one, other):
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.05)
            return len(got) >= 50

        wait_for(drain, 20)
    assert sorted(got) == list(range(50))


def test_a_reply_to_a_queue_that_is_gone_leaves_nothing(connect: Connect, queue: DBQueue) -> None:
    channel = connect().channel()
    publish(channel, 1, "no-such-reply-queue", delivery_mode=1)
    assert queue.counts() == {}


def test_remote_control_is_no_job(connect: Connect, queue: DBQueue) -> None:
    """kombu publishes it as persistent; the mailbox of a worker is not durable."""
    connection = connect()
    mailbox = kombu.pidbox.Mailbox("control", type="fanout")(connection)
    heard: list[Any] = []
    node = mailbox.Node("here", channel=connection.default_channel)

    def hello(state: Any, **arguments: Any) -> None:
        heard.append(arguments)

    node.handlers["hello"] = hello
    with node.listen():
        mailbox.cast(["here"], "hello", {"n": 1})
        connection.drain_events(timeout=10)
    assert heard == [{"n": 1}]
    assert queue.counts() == {}


def test_a_letter_is_taken_by_one_reader_only(broker_url: str) -> None:
    """Two processes read at the same moment: whoever moves the cursor has the letters."""
    with opened(broker_url.removeprefix("dbqueue+")) as database:
        one, other = Mail(database), Mail(database)
        one.open("q")
        for n in range(3):
            one.post(Letter("", "q", b"{}", str(n).encode(), 10_000_000, ("dbqueue.mail.=q",)))
        taken: list[Item] = []

        def meanwhile(item: Item) -> int:
            if not taken:
                taken.extend(other.read("q", (), 10))
            return 9

        assert one.read("q", (), 10, meanwhile) == []
        assert [letter.payload for letter in taken] == [b"0", b"1", b"2"]
        one.close()
        other.close()


def test_properties_that_amqp_does_not_know_are_dropped_where_json_cannot_hold_them(connect: Connect) -> None:
    channel = connect().channel()
    declared(channel)
    publish(channel, 1, correlation_id="c", mine=object())
    publish(channel, 1, mine="text")
    first, second = channel.basic_get("q"), channel.basic_get("q")
    assert first.properties["correlation_id"] == "c"
    assert "mine" not in first.properties
    assert second.properties["mine"] == "text"


def test_a_message_of_another_broker_is_published_again(connect: Connect) -> None:
    """As `celery migrate` does it, with all properties that it came with: those of kombu's virtual transports are in base64."""
    with kombu.Connection("memory://") as source:
        channel = source.channel()
        declared(channel)
        publish(channel, b"body", correlation_id="c")
        message = channel.basic_get("q")
    assert message.properties["body_encoding"] == "base64"
    channel = connect().channel()
    declared(channel)
    publish(channel, message.body, **message.properties)
    again = channel.basic_get("q")
    assert (bytes(again.body), again.properties["correlation_id"]) == (b"body", "c")
    assert "body_encoding" not in again.properties


def test_a_task_comes_before_the_question_that_was_sent_after_it(connect: Connect) -> None:
    """Celery's `inspect` right after a `delay` is to find the task in the worker."""
    connection, other = connect(), connect()
    tasks, control = declared(connection.default_channel, "tasks"), brief(connection.default_channel, "control")
    publish(other.default_channel, "task", "tasks")
    publish(other.default_channel, "question", "", "e", delivery_mode=1)
    got: list[str] = []
    with kombu.Consumer(connection, [control, tasks], on_message=lambda m: got.append(m.payload), no_ack=True):
        while len(got) < 2:
            connection.drain_events(timeout=10)
    assert got == ["task", "question"]


@pytest.mark.databases("postgres")
def test_a_consumer_that_was_lost_with_its_connection_does_not_count(connect: Connect, postgres: Any) -> None:
    """Celery would warn that another node uses its mailbox, and an auto-delete queue would never go."""
    connection = connect(lease=2)
    with connection.Consumer(declared(connection.default_channel), callbacks=[], accept=["json"]):
        assert declared(connection.default_channel).queue_declare(passive=True).consumer_count == 1
        postgres.stop()
        connection.collect()
    postgres.start()
    again = connect(lease=2)
    assert declared(again.default_channel).queue_declare(passive=True).consumer_count == 0


def test_what_a_queue_is_declared_with_in_vain_is_told_once(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_told", set())
    for _ in range(2):
        declared(connect().channel(), "bounded", max_length=3, expires=60, max_priority=5)
    assert [message for message in caplog.messages if "has no effect" in message] == [
        "the queue 'bounded' is declared with x-max-length, which has no effect here"
    ]


def test_what_one_process_sends_is_delivered_in_its_order(connect: Connect) -> None:
    """Remote control, tasks and events among each other, as far as a task is not held back by a better one."""
    connection, other = connect(), connect()
    channel = connection.default_channel
    control, events, tasks = brief(channel, "control", "c.pidbox"), brief(channel, "events"), declared(channel, "tasks")
    for n in range(3):
        publish(other.default_channel, f"before {n}", "", "c.pidbox", delivery_mode=1)
        publish(other.default_channel, f"task {n}", "tasks")
        publish(other.default_channel, f"after {n}", "", "c.pidbox", delivery_mode=1)
        publish(other.default_channel, f"event {n}", "", "e", delivery_mode=1)
    got: list[str] = []
    with kombu.Consumer(connection, [events, control, tasks], on_message=lambda m: got.append(m.payload), no_ack=True):
        while len(got) < 12:
            connection.drain_events(timeout=10)
    told = [text for text in got if "event" not in text]
    assert told == [f"{what} {n}" for n in range(3) for what in ("before", "task", "after")]
    for n in range(3):
        assert got.index(f"task {n}") < got.index(f"event {n}")
