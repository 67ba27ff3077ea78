"""Every verb on a job acts on the caller's transaction, and a key is unique across transactions."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import orm

from dbqueue import EnqueueFailed, IllegalMove, InvalidArgument, JobNotFound, KeyTaken, StaleUpdate, using
from dbqueue.states import State
from tests.factory import make
from tests.joined.callers import Back, Caller, engine_of
from tests.joined.shop import Order, Shop
from tests.waiting import wait_for

pytestmark = pytest.mark.req("D5")


# -- verbs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_verbs_act_on_the_callers_transaction(shop: Shop, end: str) -> None:
    queue = shop.queue
    pending = shop.ship.enqueue(Order(1)).id
    dead = uuid.UUID(bytes=make(queue.database, State.DEAD).id)
    blocked = uuid.UUID(bytes=make(queue.database, State.BLOCKED).id)
    unknown = uuid.UUID(bytes=make(queue.database, State.UNKNOWN).id)
    before = {job: state(shop, job) for job in (pending, dead, blocked, unknown)}
    after = {pending: "cancelled", dead: "pending", blocked: "pending", unknown: "discarded"}
    with closing(shop.connect()) as connection:
        with using(connection):
            sent = queue.send("mail", {"number": 2}).id
            assert queue.cancel(pending) == "pending"
            assert queue.retry(dead) == "dead"
            assert queue.retry(blocked) == "blocked"
            record = queue.get_job(unknown)
            assert record is not None
            assert record.updated_at is not None
            assert queue.resolve(unknown, "discarded", record.updated_at) == "unknown"
            assert {job: state(shop, job) for job in after} == after  # seen from inside
            assert state(shop, sent) == "pending"
            assert queue.counts() == {"pending": 3, "cancelled": 1, "discarded": 1}
            assert {job.id for job in queue.jobs(state="pending")} == {dead, blocked, sent}
            assert {depth.queue: depth.ready for depth in queue.queues()} == {"default": 2, "mail": 1}
        assert {job: state(shop, job) for job in before} == before  # and not yet from outside
        assert state(shop, sent) is None
        getattr(connection, end)()
    assert {job: state(shop, job) for job in before} == (after if end == "commit" else before)


def state(shop: Shop, job: uuid.UUID) -> str | None:
    record = shop.queue.get_job(job)
    return None if record is None else record.state


def test_the_answers_of_verbs_are_no_errors_of_the_database(shop: Shop) -> None:
    queue = shop.queue
    with closing(shop.connect()) as connection:
        with using(connection):
            with pytest.raises(JobNotFound):
                queue.cancel(uuid.uuid4())
            assert queue.get_job(uuid.uuid4()) is None
            first = shop.ship.enqueue(Order(1), key="a")
            with pytest.raises(IllegalMove):
                queue.retry(first.id)
            queue.cancel(first.id)
            shop.ship.enqueue(Order(2), key="a")
            with pytest.raises(KeyTaken):
                queue.retry(first.id)
            unknown = make_unknown(shop) if shop.postgres else None
            if unknown is not None:
                record = queue.get_job(unknown)
                assert record is not None
                assert record.created_at is not None
                with pytest.raises(StaleUpdate):
                    queue.resolve(unknown, "succeeded", record.created_at.replace(year=2000))
                with pytest.raises(InvalidArgument):
                    queue.resolve(unknown, "dead", record.created_at)
        connection.commit()  # none of them was a reason to roll back
    assert shop.jobs()[-1] == 2


def make_unknown(shop: Shop) -> uuid.UUID:
    return uuid.UUID(bytes=make(shop.queue.database, State.UNKNOWN, payload=b'{"number":0}').id)


@pytest.mark.databases("postgres")
def test_a_verb_that_meets_a_lock_fails_and_does_not_retry(shop: Shop) -> None:
    job = shop.ship.enqueue(Order(1)).id
    with closing(shop.connect()) as connection, closing(shop.connect()) as other:
        with using(other):
            shop.queue.cancel(job)
        connection.execute("SET lock_timeout = '10ms'")
        with using(connection), pytest.raises(EnqueueFailed) as caught:
            shop.queue.cancel(job)
        assert isinstance(caught.value.__cause__, psycopg.errors.LockNotAvailable)
    assert state(shop, job) == "pending"


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.req("D3", "D8")
def test_a_duplicate_in_the_same_transaction(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        first = shop.ship.enqueue(Order(1), key="a")
        again = shop.ship.enqueue(Order(2), key="a")
        other_target = shop.queue.send("mail", {"number": 3}, key="a")
        many = shop.ship.enqueue_many([Order(4), Order(5)], keys=["a", "b"])
    assert (first.duplicate, again.duplicate, other_target.duplicate) == (False, True, False)
    assert again.id == first.id == many[0].id
    assert [ref.duplicate for ref in many] == [True, False]
    caller.commit()
    assert shop.jobs() == [1, 3, 5]


@pytest.mark.req("D3", "D8")
def test_a_duplicate_of_a_committed_job(shop: Shop, caller: Caller) -> None:
    caller.rollback()
    kept = shop.ship.enqueue(Order(1), key="a")
    caller.begin()
    with using(caller.given):
        caller.order(1)
        again = shop.ship.enqueue(Order(2), key="a")
        assert again == type(again)(kept.id, True)
        shop.queue.cancel(kept.id)
        fresh = shop.ship.enqueue(Order(3), key="a")  # free again, in this transaction
        assert not fresh.duplicate
    caller.rollback()
    assert shop.both() == ([], [1])
    assert shop.ship.enqueue(Order(4), key="a").id == kept.id


@pytest.mark.req("D8")
def test_a_rolled_back_job_frees_its_key(shop: Shop, caller: Caller) -> None:
    caller.order(0)
    with using(caller.given):
        with caller.savepoint():
            shop.ship.enqueue(Order(1), key="a")
            raise Back
        assert not shop.ship.enqueue(Order(2), key="a").duplicate
    caller.rollback()
    assert not shop.ship.enqueue(Order(3), key="a").duplicate
    assert shop.jobs() == [3]


@pytest.mark.req("D8")
@pytest.mark.databases("postgres", "postgres15")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_open_transaction_makes_others_with_the_key_wait(shop: Shop, end: str) -> None:
    answers: list[Any] = []
    with closing(shop.connect()) as connection, closing(shop.connect()) as other:
        with using(connection):
            first = shop.ship.enqueue(Order(1), key="a")
            unkeyed = shop.ship.enqueue(Order(2))

        def elsewhere() -> None:
            with using(other):
                answers.append(shop.ship.enqueue(Order(3), key="a"))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        wait_for(lambda: waits(shop, other), message="the second transaction does not wait for the first one's key")
        assert not shop.ship.enqueue(Order(4), key="b").duplicate  # nobody else waits
        getattr(connection, end)()
        thread.join()
        other.commit()
    (answer,) = answers
    assert answer.duplicate is (end == "commit")
    assert (answer.id == first.id) is (end == "commit")
    assert unkeyed.duplicate is False
    assert shop.jobs() == ([1, 2, 4] if end == "commit" else [3, 4])


def waits(shop: Shop, connection: psycopg.Connection) -> bool:
    pid = connection.info.backend_pid
    return bool(shop.look(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"))


@pytest.mark.req("D8")
@pytest.mark.databases("postgres")
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_keys_in_opposite_orders_do_not_deadlock(shop: Shop, driver: str) -> None:
    """One statement takes them all in one order, whatever order they were given in."""
    keys = [f"k{number:03}" for number in range(100)]
    start = threading.Barrier(4)
    failed: list[BaseException] = []
    written: list[int] = []
    engine = engine_of(shop, driver)

    def work(mine: list[str]) -> None:
        try:
            for number in range(5):
                with orm.Session(engine) as session, using(session):
                    start.wait(10)
                    refs = shop.ship.enqueue_many(
                        [Order(n) for n in range(100)], keys=[f"{number}{key}" for key in mine]
                    )
                    written.append(sum(not ref.duplicate for ref in refs))
                    session.commit()
        except BaseException as error:
            failed.append(error)
            start.abort()

    threads = [
        threading.Thread(target=work, args=(order,)) for order in (keys, keys[::-1], keys[50:] + keys[:50], keys[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.dispose()
    assert failed == []
    assert sum(written) == len(shop.jobs()) == 500


@pytest.mark.req("D8")
def test_a_committed_duplicate_is_seen_by_every_isolation_level_that_can(
    shop: Shop, make_shop: Callable[..., Shop]
) -> None:
    kept = shop.ship.enqueue(Order(1), key="a")
    with closing(shop.connect()) as connection:
        if shop.postgres:
            connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        with using(connection):
            assert shop.ship.enqueue(Order(2), key="a").id == kept.id
        connection.commit()
    assert shop.jobs() == [1]
