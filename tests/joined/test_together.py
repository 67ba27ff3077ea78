"""Job and business row: both or neither, for every kind of caller, savepoints included."""

from __future__ import annotations

import pytest

from dbqueue import using
from tests.joined.callers import Back, Caller
from tests.joined.shop import Order, Shop

pytestmark = pytest.mark.req("D5")


def test_both_are_there_after_commit(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        caller.order(1)
        answer = shop.ship.enqueue(Order(1))
    assert answer.duplicate is False
    assert shop.both() == ([], [])  # another connection sees neither before
    caller.commit()
    assert shop.both() == ([1], [1])


def test_neither_is_there_after_rollback(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        caller.order(1)
        shop.ship.enqueue(Order(1))
    caller.rollback()
    assert shop.both() == ([], [])
    caller.begin()
    with using(caller.given):  # and the next transaction is none the worse
        caller.order(2)
        shop.ship.enqueue(Order(2))
    caller.commit()
    assert shop.both() == ([2], [2])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_job_may_be_the_first_or_only_statement(shop: Shop, caller: Caller, end: str) -> None:
    with using(caller.given):
        shop.ship.enqueue(Order(1))
    assert shop.jobs() == []
    getattr(caller, end)()
    assert shop.jobs() == ([1] if end == "commit" else [])


def test_closing_without_a_commit_leaves_neither(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        caller.order(1)
        shop.ship.enqueue(Order(1))
    caller.close()
    assert shop.both() == ([], [])


def test_a_savepoint_takes_its_jobs_along(shop: Shop, caller: Caller) -> None:
    caller.order(1)
    with using(caller.given):
        shop.ship.enqueue(Order(1))
        with caller.savepoint():
            caller.order(2)
            shop.ship.enqueue(Order(2))
            raise Back
        with caller.savepoint():
            caller.order(3)
            shop.ship.enqueue(Order(3))
            with caller.savepoint():
                caller.order(4)
                shop.ship.enqueue(Order(4))
                raise Back
        with caller.savepoint():
            with caller.savepoint():
                caller.order(5)
                shop.ship.enqueue(Order(5))
            raise Back  # what was released inside goes with the outer one
        shop.ship.enqueue(Order(6))
        caller.order(6)
    caller.commit()
    assert shop.both() == ([1, 3, 6], [1, 3, 6])


def test_a_released_savepoint_goes_with_the_transaction(shop: Shop, caller: Caller) -> None:
    caller.order(1)
    with using(caller.given), caller.savepoint():
        caller.order(2)
        shop.ship.enqueue(Order(2))
    caller.rollback()
    assert shop.both() == ([], [])


def test_two_blocks_on_one_transaction(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        caller.order(1)
        shop.ship.enqueue(Order(1))
    caller.order(2)
    with using(caller.given):
        shop.ship.enqueue(Order(2))
        with using(caller.given):
            shop.ship.enqueue(Order(3))
        shop.ship.enqueue(Order(4))
    assert shop.both() == ([], [])
    caller.commit()
    assert shop.both() == ([1, 2], [1, 2, 3, 4])


def test_an_exception_in_the_block_ends_the_block_and_nothing_else(shop: Shop, caller: Caller) -> None:
    with pytest.raises(ZeroDivisionError), using(caller.given):  # noqa: PT012
        caller.order(1)
        shop.ship.enqueue(Order(1))
        raise ZeroDivisionError
    assert shop.both() == ([], [])
    caller.commit()  # the block neither committed nor rolled back; that is the caller's to decide
    assert shop.both() == ([1], [1])
    shop.ship.enqueue(Order(2))  # and the block is over: this is a transaction of its own
    assert shop.jobs() == [1, 2]


@pytest.mark.req("D3")
def test_every_way_to_enqueue_joins(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        shop.ship.enqueue_many([Order(n) for n in range(5)], keys=["a", None, "a", "b", None])
        shop.ship.enqueue(Order(5), delay=60)
        shop.queue.send("mail", {"number": 6})
        assert shop.ship.enqueue_many([]) == []
    assert shop.jobs() == []
    caller.commit()
    assert shop.jobs() == [0, 1, 3, 4, 5, 6]


@pytest.mark.databases("postgres15")
def test_the_oldest_postgres_that_is_tested(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        caller.order(1)
        shop.ship.enqueue(Order(1), key="a")
        assert shop.ship.enqueue(Order(2), key="a").duplicate
        shop.ship.enqueue_many([Order(3), Order(4)], keys=["a", "b"])
    caller.commit()
    assert shop.both() == ([1], [1, 4])
