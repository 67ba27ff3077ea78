"""What a task leaves behind can be recorded, and be written by whoever settles it, in one transaction: nothing before, then all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from celery import Celery, chain, chord

from dbqueue import DBQueue
from dbqueue.celery_backend.recording import Record
from tests.results.chords import Failed, Hand, count, make_app, messages, request_of, rows, run
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import queue as queue

pytestmark = [pytest.mark.req("C9", "D13"), pytest.mark.timeout(60)]


@pytest.fixture
def app(broker_url: str, queue: DBQueue) -> Iterator[Celery]:
    app = make_app(broker_url, broker_url)

    @app.task(shared=False, bind=True, name="tests.results.chords.states", max_retries=1)
    def states(self: Any, retries: bool) -> str:
        self.update_state(state="HALFWAY", meta={"n": 1})
        if retries:
            raise self.retry(countdown=0)
        return "done"

    yield app
    app.backend.place.database.close()
    app.close()


@pytest.fixture
def hand(app: Celery) -> Iterator[Hand]:
    with closing(Hand(app)) as hand:
        yield hand


def task(app: Celery, name: str) -> Any:
    return app.tasks[f"tests.results.chords.{name}"]


def recorded(app: Celery, message: Any) -> Record:
    """Runs it; its record has been in another process since."""
    with app.backend.recording() as record, app.backend.publishing(record):
        run(app, request_of(message))
    message.ack()
    return Record(pickle.loads(pickle.dumps(record.entries)))


def apply(app: Celery, *records: Record) -> None:
    """First in a transaction that ends with its process, as far as the database can tell; then in one that commits."""

    class Died(Exception):
        pass

    database = app.backend.place.database
    before = stored(app)
    for dies in (True, False):
        try:
            with database.transaction() as session:
                for record in records:
                    app.backend.apply(session, record)
                if dies:
                    raise Died
        except Died:
            assert stored(app) == before


def stored(app: Celery) -> list[int]:
    database = app.backend.place.database
    waiting = rows(database, "SELECT count(*) FROM dbqueue_jobs WHERE state = 0")[0][0]
    return [int(waiting), count(database, "results"), count(database, "chord_parts")]


def test_a_result_and_what_follows(app: Celery, hand: Hand) -> None:
    add = task(app, "add")
    result = chain(add.s(1, 1), add.s(2)).apply_async(link=add.s(3))
    record = recorded(app, hand.take())
    assert stored(app) == [0, 0, 0]
    assert hand.drain() == []
    apply(app, record)
    assert app.AsyncResult(result.parent.id).result == 2
    assert hand.drain() == ["add", "add"]
    assert result.get(timeout=5) == 4


@pytest.mark.parametrize("retries", [False, True])
def test_states_on_the_way_are_seen_at_once(app: Celery, hand: Hand, retries: bool) -> None:
    result = task(app, "states").delay(retries)
    record = recorded(app, hand.take())
    assert result.state == "HALFWAY"
    assert hand.take_all() == [], "the retry is not there yet"
    apply(app, record)
    assert result.state == ("RETRY" if retries else "SUCCESS")
    assert len(hand.take_all()) == retries


def test_a_failure_and_its_callback(app: Celery, hand: Hand) -> None:
    result = task(app, "fail").apply_async(link_error=task(app, "told").s())
    record = recorded(app, hand.take())
    assert result.state == "PENDING"
    apply(app, record)
    assert hand.drain() == ["told"]
    with pytest.raises(Failed):
        result.get(timeout=5)


def test_a_chord(app: Celery, hand: Hand, queue: DBQueue) -> None:
    """Each part in a transaction of its own, and two in one; the body is published with the last."""
    add, total = task(app, "add"), task(app, "total")
    result = chord([add.s(n, 0) for n in range(3)])(total.s())
    records = [recorded(app, part) for part in hand.take_all()]
    assert hand.take_all() == []
    apply(app, records[0])
    assert hand.take_all() == []
    apply(app, *records[1:])
    assert hand.drain() == ["total"]
    assert messages(queue.database, result.id) == 1
    assert result.get(timeout=5) == [0, 1, 2]


def test_a_chord_that_fails(app: Celery, hand: Hand, queue: DBQueue) -> None:
    """Its error callback is published, and its body fails, in the transaction of the last part."""
    add, fail, told, total = (task(app, name) for name in ("add", "fail", "told", "total"))
    result = chord([fail.s(), add.s(2, 2)])(total.s().on_error(told.s()))
    records = [recorded(app, part) for part in hand.take_all()]
    apply(app, *records)
    assert hand.drain() == ["told"]
    assert app.AsyncResult(result.id).state == "FAILURE"
    assert messages(queue.database, result.id) == 0


def test_messages_for_another_broker_are_sent(app: Celery, hand: Hand, tmp_path: Any) -> None:
    other = make_app(f"dbqueue+sqlite:///{tmp_path / 'other.db'}", app.conf.result_backend)
    with closing(Hand(other)) as theirs:
        with app.backend.recording() as record, app.backend.publishing(record):
            task(other, "add").delay(1, 1)
        assert record.entries == []
        assert theirs.drain() == ["add"]
    other.close()
