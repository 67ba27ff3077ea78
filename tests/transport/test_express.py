"""The event loop's own way to the database: what it sends while it turns, and who takes over when it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import kombu
import psycopg
import pytest
from kombu.asynchronous import Hub

from dbqueue import DBQueue
from dbqueue.kombu_transport import station as stations
from dbqueue.kombu_transport import transport as transports
from dbqueue.kombu_transport.express import Express
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C4"), pytest.mark.databases("postgres")]

Connect = Callable[..., kombu.Connection]


class Loop:
    """A consumer of the queue ``q`` in an event loop, as a Celery worker is one."""

    def __init__(self, connection: kombu.Connection, prefetch: int) -> None:
        self.hub, self.connection = Hub(), connection
        self.got: list[Any] = []
        self.on_message: Callable[[Any], object] = lambda message: message.ack()
        self.turns: list[str] = []
        channel = connection.default_channel
        queue = kombu.Queue("q", routing_key="q")(channel)
        queue.declare()
        self.consumer = kombu.Consumer(channel, [queue], on_message=self._take, prefetch_count=prefetch)
        connection.register_with_event_loop(self.hub)
        self.consumer.consume()
        self._loop = self.hub.create_loop()

    @property
    def station(self) -> stations.Station:
        found: stations.Station = self.connection.transport.station
        return found

    @property
    def express(self) -> Express:
        express = self.connection.transport._express
        assert express is not None
        return express  # type: ignore[no-any-return]

    def _take(self, message: Any) -> None:
        self.got.append(message)
        self.on_message(message)

    def turn(self) -> None:
        self.hub.timer.call_after(0.005, lambda: None)  # it sleeps no longer than that
        next(self._loop)

    def until(self, condition: Callable[[], object], deadline: float = 10.0) -> None:
        end = time.monotonic() + deadline
        while not condition():
            assert time.monotonic() < end, "the loop waits for something that does not come"
            self.turn()


@pytest.fixture
def loops(connect: Connect) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(prefetch: int = 4, **options: Any) -> Loop:
        made.append(Loop(connect(**options), prefetch))
        return made[-1]

    yield make
    for loop in made:
        loop.connection.release()
        loop.hub.close()


def publish(connect: Connect, count: int) -> None:
    producer = kombu.Producer(connect().default_channel)
    for number in range(count):
        producer.publish({"n": number}, routing_key="q")


def states(queue: DBQueue) -> dict[str, int]:
    return {state: count for state, count in queue.counts().items() if count}


def test_a_turning_loop_does_it_itself(
    loops: Callable[..., Loop], connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_loop: list[bool] = []
    answered = stations.Station.answered

    def note(self: stations.Station, request: Any, result: Any) -> None:
        if request.settling:
            by_loop.extend([threading.current_thread() is threading.main_thread()] * len(request.settling))
        answered(self, request, result)

    monkeypatch.setattr(stations.Station, "answered", note)
    loop = loops(prefetch=4)
    publish(connect, 200)
    loop.until(lambda: states(queue) == {"acked": 200})
    assert sorted(message.payload["n"] for message in loop.got) == list(range(200))
    assert sum(by_loop) > len(by_loop) / 2


def test_acks_go_with_the_next_claim(
    loops: Callable[..., Loop], connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone ack waits a moment, so that it is not on its way to the disk when the result of its task comes; then it is written."""
    turns: list[tuple[int, bool, int]] = []
    answered = stations.Station.answered

    def note(self: stations.Station, request: Any, result: Any) -> None:
        turns.append((len(request.settling), request.turn.prompt, len(result.claimed)))
        answered(self, request, result)

    monkeypatch.setattr(stations.Station, "answered", note)
    monkeypatch.setattr(stations, "MOMENT", 1.0)
    loop = loops(prefetch=4)
    for number in range(20):
        publish(connect, 1)
        loop.until(lambda number=number: len(loop.got) > number)  # type: ignore[misc]
    loop.until(lambda: states(queue) == {"acked": 20})
    assert sum(bool(settles) and not claimed for settles, _, claimed in turns) <= 5
    assert all(prompt for _, prompt, claimed in turns if claimed)


def test_a_bell_is_known_by_its_name(queue: DBQueue, connect: Connect) -> None:
    listener = queue.database.listener(("q", "other"))
    assert listener is not None
    try:
        listener.announce()
        publish(connect, 1)
        wait_for(listener.heard, 5, "nobody rang")
        assert listener.rung() == {"q"}
        assert listener.rung() == set()
    finally:
        listener.close()


def test_a_loop_that_is_blocked_is_stood_in_for(loops: Callable[..., Loop], connect: Connect, queue: DBQueue) -> None:
    """As a solo worker's task blocks it: what was acked before is written meanwhile, also with a turn in the air."""
    loop = loops(prefetch=8)
    publish(connect, 20)

    def block(message: Any) -> None:
        message.ack()
        if len(loop.got) in (5, 12):
            wait_for(lambda: states(queue).get("acked", 0) >= len(loop.got), 5, "nobody wrote the acks")

    loop.on_message = block
    loop.until(lambda: states(queue) == {"acked": 20})
    assert len(loop.got) == 20


def test_a_lone_ack_waits_for_others_only_a_moment(
    loops: Callable[..., Loop], connect: Connect, queue: DBQueue
) -> None:
    """There is more to claim, and the consumer has more to do: acks are gathered, but not for ever."""
    loop = loops(prefetch=8)
    publish(connect, 30)
    loop.on_message = lambda message: message.ack() if len(loop.got) == 1 else None
    written = threading.Event()

    def look() -> None:  # not in the loop, which would turn too seldom
        wait_for(lambda: states(queue).get("acked") == 1)
        written.set()

    looking = threading.Thread(target=look)
    looking.start()
    loop.until(written.is_set, 3)
    looking.join()


def in_the_air(loop: Loop) -> bool:
    """Whether a turn is in the air, after the loop had an opportunity to send one."""
    loop.express.tick()
    return loop.express._flying is not None


def test_a_connection_that_is_cut_with_a_turn_in_the_air(
    loops: Callable[..., Loop], connect: Connect, queue: DBQueue, database_url: str
) -> None:
    """The loop does not wait for it, and each message is acked in the end; those that the lost answer held come again."""
    loop = loops(prefetch=4, lease=5)
    cuts = 0
    publish(connect, 60)

    def cut(message: Any) -> None:
        nonlocal cuts
        message.ack()
        if cuts < 3 and len(loop.got) > 15 * (cuts + 1) and in_the_air(loop):
            cuts += 1
            with psycopg.connect(database_url, autocommit=True) as other:
                other.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s",
                    [loop.station.session.connection.info.backend_pid],  # type: ignore[union-attr]
                )

    loop.on_message = cut
    loop.until(lambda: states(queue) == {"acked": 60}, 30)
    assert cuts == 3
    assert {message.payload["n"] for message in loop.got} == set(range(60))


def test_a_loop_that_ends_with_a_turn_in_the_air(loops: Callable[..., Loop], connect: Connect, queue: DBQueue) -> None:
    loop = loops(prefetch=4)
    publish(connect, 30)
    ended = False

    def end(message: Any) -> None:
        nonlocal ended
        message.ack()
        if not ended and len(loop.got) >= 5 and in_the_air(loop):
            ended = True
            transport = loop.connection.transport
            transport.unregister_from_event_loop(loop.connection.connection, loop.hub)

    loop.on_message = end
    loop.until(lambda: ended)
    while len(loop.got) < 30:
        loop.connection.drain_events(timeout=5)
    wait_for(lambda: states(queue) == {"acked": 30})
    assert not loop.hub.readers, "the loop watches nothing of ours any more"
    assert not loop.hub.on_tick


def test_a_refused_turn_of_the_loop_is_done_row_by_row(
    loops: Callable[..., Loop], connect: Connect, queue: DBQueue, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loops(prefetch=4)
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF convert_from(OLD.payload, 'UTF8') LIKE '%\"n\": 7}' THEN RAISE 'no'; END IF; RETURN OLD; END $$"
        )
        other.execute("CREATE TRIGGER refuse BEFORE DELETE ON dbqueue_jobs FOR EACH ROW EXECUTE FUNCTION refuse()")
        publish(connect, 20)
        loop.until(lambda: states(queue) == {"acked": 19, "running": 1}, 20)
        other.execute("DROP TRIGGER refuse ON dbqueue_jobs")
    loop.until(lambda: states(queue) == {"acked": 20}, 20)
    assert len(loop.got) == 20


def test_what_is_left_behind_an_executed_task_is_delivered_next(
    loops: Callable[..., Loop], connect: Connect, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a solo worker: delivering stops behind each message whose task was executed, and the loop turns again at once."""
    loop = loops(prefetch=8)
    monkeypatch.setattr(transports, "tasks_begun", lambda: len(loop.got))
    publish(connect, 40)

    def all_acked() -> bool:
        assert loop.connection.transport._rung or not loop.connection.default_channel.waiting, "nobody wakes the loop"
        return states(queue) == {"acked": 40}

    loop.until(all_acked)
