"""Chords: the body is published once, with what every part returned, however the parts come back (C9)."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError
from celery.worker.request import Context

import dbqueue
from dbqueue import DBQueue
from tests.proxy import Proxy
from tests.results.chords import Failed, Hand, count, make_app, messages, request_of, revoke, rows
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import make_shop as make_shop
from tests.transport.conftest import queue as queue
from tests.transport.shops import Shop
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C9"), pytest.mark.timeout(60)]


@pytest.fixture
def app(broker_url: str, queue: DBQueue) -> Iterator[Celery]:
    app = make_app(broker_url, broker_url)
    yield app
    closed(app)


@pytest.fixture
def hand(app: Celery) -> Iterator[Hand]:
    with closing(Hand(app)) as hand:
        yield hand


def closed(app: Celery) -> None:
    app.backend.place.database.close()
    app.close()


def task(app: Celery, name: str) -> Any:
    return app.tasks[f"tests.results.chords.{name}"]


def body_error(app: Celery, result: Any) -> Any:
    """What became of the body; ``get()`` would raise the header's error."""
    return app.AsyncResult(result.id).result


# -- counting ----------------------------------------------------------------------------------------------------------


def test_the_body_gets_the_results_in_the_order_of_the_header(app: Celery, hand: Hand, queue: DBQueue) -> None:
    add, total = task(app, "add"), task(app, "total")
    result = chord(add.s(n, 0) for n in range(20))(total.s())
    parts = hand.take_all()
    random.Random(7).shuffle(parts)
    for part in parts[:-1]:
        hand.run(part)
    assert hand.take_all() == []
    hand.run(parts[-1])
    assert hand.drain() == ["total"]
    assert result.get(timeout=5) == list(range(20))
    assert count(queue.database, "chord_parts") == 0


def test_a_part_that_comes_again_counts_once(app: Celery, hand: Hand, queue: DBQueue) -> None:
    """While the others are out, and when the body was published, and when it has run."""
    add, total = task(app, "add"), task(app, "total")
    result = chord([add.s(n, 0) for n in range(3)])(total.s())
    first, second, third = hand.take_all()
    for part in (first, second, first, second, second):
        hand.run(part)
    assert hand.take_all() == []
    hand.run(third)
    hand.run(first)
    assert hand.drain() == ["total"]
    hand.run(third)
    assert hand.drain() == []
    assert messages(queue.database, result.id) == 1
    assert result.get(timeout=5) == [0, 1, 2]


@pytest.mark.parametrize("same", [False, True], ids=["different parts", "the same part"])
def test_parts_that_return_at_the_same_moment(app: Celery, hand: Hand, queue: DBQueue, same: bool) -> None:
    add, total = task(app, "add"), task(app, "total")
    for _ in range(5):
        result = chord([add.s(n, 0) for n in range(4)])(total.s())
        parts = hand.take_all()
        if same:
            for part in parts[1:]:
                hand.run(part)
            parts = [parts[0]] * 4
        barrier = threading.Barrier(4)

        def returns(part: Any, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            hand.run(part)

        threads = [threading.Thread(target=returns, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert hand.drain() == ["total"]
        assert messages(queue.database, result.id) == 1
        assert result.get(timeout=5) == [0, 1, 2, 3]


def test_groups_in_the_header_keep_their_shape(app: Celery, hand: Hand, queue: DBQueue) -> None:
    add, total = task(app, "add"), task(app, "total")
    result = chord([add.s(1, 1), chain(add.s(2, 0), group(add.s(10), add.s(20))), add.s(3, 3)])(total.s())
    assert hand.drain()[-1] == "total"
    assert result.get(timeout=5) == [2, [12, 22], 6]
    assert count(queue.database, "groups") == 0


def test_a_chord_of_chords(app: Celery, hand: Hand, queue: DBQueue) -> None:
    add, total = task(app, "add"), task(app, "total")
    inner = [chord([add.s(n, m) for m in range(3)], total.s()) for n in range(3)]
    result = chord(inner)(chord([total.s(), total.s()], total.s()))
    ran = hand.drain()
    assert (ran.count("add"), ran.count("total")) == (9, 3 + 2 + 1)
    assert result.get(timeout=5) == [[[0, 1, 2], [1, 2, 3], [2, 3, 4]]] * 2


def test_a_header_that_is_made_while_its_parts_return(app: Celery, hand: Hand) -> None:
    add, total = task(app, "add"), task(app, "total")
    ran = []

    def header() -> Iterator[Any]:
        for n in range(6):
            ran.extend(hand.drain())
            yield add.s(n, 0)

    result = chord(header())(total.s())
    assert 1 <= len(ran) < 6, "its first parts returned before the last was there"
    assert set(ran) == {"add"}
    assert hand.drain()[-1] == "total"
    assert result.get(timeout=5) == list(range(6))


def test_a_frozen_chord_runs_once_each_time_it_is_applied(app: Celery, hand: Hand, queue: DBQueue) -> None:
    add, total = task(app, "add"), task(app, "total")
    frozen = chord([add.s(1, 1), add.s(2, 2)], total.s())
    frozen.freeze()
    for _ in range(2):
        result = frozen.apply_async()
        assert hand.drain() == ["add", "add", "total"]
        assert result.get(timeout=5) == [2, 4]


def test_a_part_adds_parts(app: Celery, hand: Hand) -> None:
    add, adds, total = task(app, "add"), task(app, "adds"), task(app, "total")
    result = chord([adds.s(1), add.s(2, 2)])(total.s())
    assert hand.drain() == ["adds", "add", "add", "total"]
    assert sorted(result.get(timeout=5)) == [1, 4, 101]


# -- failing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["fail", "add"])
def test_a_part_that_fails(app: Celery, hand: Hand, queue: DBQueue, last: str) -> None:
    """The body's errors are called once, when all parts are back; a copy of a part that comes later changes nothing."""
    add, fail, told, total = (task(app, name) for name in ("add", "fail", "told", "total"))
    result = chord([fail.s(), add.s(1, 1)])(total.s().on_error(told.s()))
    parts = sorted(hand.take_all(), key=lambda part: part.headers["task"].endswith(last))
    hand.run(parts[0])
    assert hand.take_all() == []
    hand.run(parts[1])
    assert hand.drain() == ["told"]
    for part in parts:
        hand.run(part)
    assert hand.drain() == []
    assert isinstance(body_error(app, result), ChordError)
    with pytest.raises(Failed):
        result.get(timeout=5)
    assert messages(queue.database, result.id) == 0
    assert [app.AsyncResult(part.headers["id"]).state for part in parts] == (
        ["FAILURE", "SUCCESS"] if last == "add" else ["SUCCESS", "FAILURE"]
    )


def test_a_chain_in_the_header_that_fails_in_its_middle(app: Celery, hand: Hand) -> None:
    add, fail, total = task(app, "add"), task(app, "fail"), task(app, "total")
    result = chord([chain(fail.si(), add.si(1, 1), add.s(2)), add.s(1, 1)])(total.s())
    assert sorted(hand.drain()) == ["add", "fail"]
    assert isinstance(body_error(app, result), ChordError)


def test_a_revoked_part_fails_the_chord(app: Celery, hand: Hand) -> None:
    add, told, total = task(app, "add"), task(app, "told"), task(app, "total")
    result = chord([add.s(0, 0), add.s(1, 1)])(total.s().on_error(told.s()))
    first, second = hand.take_all()
    revoke(app, first)
    hand.run(second)
    assert hand.drain() == ["told"]
    assert TaskRevokedError.__name__ in str(body_error(app, result))


def test_a_body_that_cannot_be_published_fails_the_chord_and_leaves_nothing_of_it(
    app: Celery, hand: Hand, queue: DBQueue
) -> None:
    """Its second task cannot be encoded; the first was written already."""
    add, total = task(app, "add"), task(app, "total")
    result = chord([add.s(1, 1), add.s(2, 2)])(group(total.s(), total.s().set(serializer="no such serializer")))
    assert hand.drain() == ["add", "add"]
    assert [app.AsyncResult(part.id).state for part in result.results] == ["FAILURE", "FAILURE"]
    assert messages(queue.database, result.results[0].id) == 0


# -- whose transaction -------------------------------------------------------------------------------------------------


@pytest.fixture
def caller(queue: DBQueue) -> Iterator[Any]:
    """A connection of the caller's own, in a transaction."""
    url = queue.database.url
    if url.drivername == "sqlite":
        connection: Any = sqlite3.connect(url.database or "")
    else:
        connection = psycopg.connect(url.render_as_string(hide_password=False))
    yield connection
    connection.close()


@pytest.mark.parametrize("commit", [False, True])
def test_a_chord_joins_the_callers_transaction(
    app: Celery, hand: Hand, queue: DBQueue, caller: Any, commit: bool
) -> None:
    add, total = task(app, "add"), task(app, "total")
    app.backend.place.database.ready()
    with dbqueue.using(caller):
        header = [add.s(1, 1), chain(add.s(2, 0), group(add.s(10), add.s(20)))]
        result = chord(header)(total.s())
        saved = group(add.s(0, 0), add.s(0, 1)).apply_async()
        saved.save()
    assert [count(queue.database, table) for table in ("jobs", "chords", "groups")] == [0, 0, 0]
    (caller.commit if commit else caller.rollback)()
    if not commit:
        assert hand.drain() == []
        assert [count(queue.database, table) for table in ("jobs", "chords", "groups", "chord_parts")] == [0] * 4
        return
    assert hand.drain().count("total") == 1
    assert result.get(timeout=5) == [2, [12, 22]]
    restored = app.GroupResult.restore(saved.id)
    assert restored is not None
    assert restored.get(timeout=5) == [0, 1]


@pytest.mark.databases("sqlite")
def test_a_part_that_would_wait_for_its_own_thread_is_refused_at_once(app: Celery, hand: Hand, caller: Any) -> None:
    """Results do not join: the task has ended, whatever becomes of the caller's transaction."""
    result = chord([task(app, "add").s(1, 1)] * 2)(task(app, "total").s())
    first, second = hand.take_all()
    hand.run(first)
    caller.execute("BEGIN IMMEDIATE")
    request = Context(request_of(second))
    with dbqueue.using(caller), pytest.raises(dbqueue.WouldDeadlock):
        app.backend.mark_as_done(request.id, 2, request=request)
    caller.rollback()
    hand.run(second)
    assert hand.drain() == ["total"]
    assert result.get(timeout=5) == [2, 2]


def test_a_broker_in_another_database(make_database_url: Callable[[], str], broker_url: str, queue: DBQueue) -> None:
    app = make_app(f"dbqueue+{make_database_url()}", broker_url)
    with closing(Hand(app)) as hand:
        result = chord([task(app, "add").s(n, 0) for n in range(3)])(task(app, "total").s())
        assert hand.drain() == ["add"] * 3 + ["total"]
        assert result.get(timeout=5) == [0, 1, 2]
    assert count(queue.database, "jobs") == 0
    closed(app)


def test_a_broker_that_is_no_database(broker_url: str, queue: DBQueue) -> None:
    app = make_app("memory://", broker_url)
    with closing(Hand(app)) as hand:
        result = chord([task(app, "add").s(n, 0) for n in range(3)])(task(app, "total").s())
        assert hand.drain() == ["add"] * 3 + ["total"]
        assert result.get(timeout=5) == [0, 1, 2]
    closed(app)


# -- expiry ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expires", [0, None])
def test_results_that_are_kept_for_ever_keep_no_chord_for_ever(
    broker_url: str, queue: DBQueue, expires: int | None
) -> None:
    """That a chord is done is remembered for as long as a copy of a part may come."""
    app = make_app(broker_url, broker_url, result_expires=expires)
    with closing(Hand(app)) as hand:
        result = chord([task(app, "add").s(n, 0) for n in range(2)])(task(app, "total").s())
        parts = hand.take_all()
        assert rows(queue.database, "SELECT expires_at FROM dbqueue_chords") == [(None,)]
        for part in parts:
            hand.run(part)
        assert hand.drain() == ["total"]
        hand.run(parts[0])
        ((until,),) = rows(queue.database, "SELECT expires_at FROM dbqueue_chords")
        assert until is not None
        app.backend.place.database.clock.advance(2 * 86_400)
        app.backend.cleanup()
        assert count(queue.database, "chords") == 0
        assert result.get(timeout=5) == [0, 1]
        assert rows(queue.database, "SELECT DISTINCT expires_at FROM dbqueue_results") == [(None,)]
    closed(app)


def test_a_chord_that_nobody_finished_expires_with_its_parts(broker_url: str, queue: DBQueue) -> None:
    app = make_app(broker_url, broker_url, result_expires=60)
    with closing(Hand(app)) as hand:
        chord([task(app, "add").s(n, 0) for n in range(2)])(task(app, "total").s())
        hand.run(hand.take())
        clock = app.backend.place.database.clock
        clock.advance(59)
        app.backend.cleanup()
        assert [count(queue.database, table) for table in ("chords", "chord_parts")] == [1, 1]
        hand.run(hand.take())  # lives on from here
        assert hand.drain() == ["total"]
        clock.advance(61)
        app.backend.cleanup()
        tables = ("chords", "chord_parts", "groups", "results")
        assert [count(queue.database, table) for table in tables] == [0] * 4
    closed(app)


# -- connections that end ----------------------------------------------------------------------------------------------


@pytest.fixture
def proxied(database_url: str, broker_url: str, queue: DBQueue) -> Iterator[tuple[Proxy, Celery, Hand]]:
    """Results go through a proxy, and with them what is published in their transaction; the rest of the broker goes past it."""
    proxy = Proxy(database_url)
    app = make_app(broker_url, f"dbqueue+{proxy.url}")
    app.backend.place.database.ready()
    with closing(Hand(app)) as hand:
        yield proxy, app, hand
    closed(app)
    proxy.close()


@pytest.mark.databases("postgres")
@pytest.mark.parametrize(
    ("loss", "marker"),
    [
        ("request", b"dbqueue_results"),
        ("request", b"dbqueue_chord_parts"),
        ("request", b"SAVEPOINT"),
        ("request", b"dbqueue_jobs"),
        ("request", b"RELEASE"),
        ("request", b"COMMIT\0"),
        ("answer", b"COMMIT\0"),
    ],
)
def test_the_last_parts_transaction_loses_its_connection(
    proxied: tuple[Proxy, Celery, Hand], queue: DBQueue, loss: str, marker: bytes
) -> None:
    """It is done again, and finds what was done."""
    proxy, app, hand = proxied
    result = chord([task(app, "add").s(n, 0) for n in range(2)])(task(app, "total").s())
    first, last = hand.take_all()
    hand.run(first)
    (proxy.lose_answer if loss == "answer" else proxy.lose_request)(marker)
    hand.run(last)
    assert (proxy.armed, proxy.losses) == (False, 1)
    assert app.AsyncResult(last.headers["id"]).state == "SUCCESS"
    assert hand.drain() == ["total"]
    assert messages(queue.database, result.id) == 1
    assert result.get(timeout=5) == [0, 1]


@pytest.mark.databases("postgres")
def test_parts_that_are_added_without_an_answer_count_once(proxied: tuple[Proxy, Celery, Hand]) -> None:
    proxy, app, hand = proxied
    result = chord([task(app, "adds").s(1), task(app, "add").s(2, 2)])(task(app, "total").s())
    first, second = hand.take_all()
    proxy.lose_answer(b"COMMIT\0")
    hand.run(first)
    assert (proxy.armed, proxy.losses) == (False, 1)
    hand.run(second)
    assert hand.drain() == ["add", "total"]
    assert sorted(result.get(timeout=5)) == [1, 4, 101]


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("loss", ["request", "answer"])
def test_a_body_for_another_broker_is_published_at_least_once(
    make_database_url: Callable[[], str], database_url: str, broker_url: str, queue: DBQueue, loss: str
) -> None:
    proxy = Proxy(database_url)
    app = make_app(f"dbqueue+{make_database_url()}", f"dbqueue+{proxy.url}")
    app.backend.place.database.ready()
    with closing(Hand(app)) as hand:
        result = chord([task(app, "add").s(n, 0) for n in range(2)])(task(app, "total").s())
        first, last = hand.take_all()
        hand.run(first)
        (proxy.lose_answer if loss == "answer" else proxy.lose_request)(b"COMMIT\0")
        hand.run(last)
        assert proxy.losses == 1
        assert hand.drain() == ["total"] * (1 if loss == "answer" else 2)
        assert result.get(timeout=5) == [0, 1]
    closed(app)
    proxy.close()


@pytest.mark.databases("postgres")
def test_connections_that_ended_between_two_parts(app: Celery, hand: Hand, postgres: Any, queue: DBQueue) -> None:
    result = chord([task(app, "add").s(n, 0) for n in range(3)])(task(app, "total").s())
    for part in hand.take_all():
        rows(
            queue.database,
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        hand.run(part)
    wait_for(lambda: messages(queue.database, result.id) == 1)
    with closing(Hand(app)) as again:
        assert again.drain()[-1] == "total"
    assert result.get(timeout=5) == [0, 1, 2]


# -- real workers ------------------------------------------------------------------------------------------------------


def test_real_workers(make_shop: Callable[..., Shop], broker_url: str, queue: DBQueue) -> None:
    """C131, small. Two of them, of two processes each; one part is revoked before they start."""
    shop = make_shop(backend=broker_url)
    add, total = shop.app.add, shop.app.total
    results = [chord(add.s(n, m) for m in range(20))(total.s()) for n in range(3)]
    broken = chord([add.s(1, 1), add.s(2, 2)])(total.s())
    broken.parent.results[0].revoke()
    for _ in range(2):
        shop.worker()
    assert [result.get(timeout=60) for result in results] == [20 * n + 190 for n in range(3)]
    with pytest.raises(TaskRevokedError):
        broken.get(timeout=60)
    assert [messages(queue.database, result.id) for result in results] == [1, 1, 1]
