"""Schedules join: one is there if and only if the caller's transaction was committed, for every kind of caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dbqueue import InvalidSpec, NotSupported, ScheduleNotFound, using
from tests.joined.async_callers import AsyncGiven, Run
from tests.joined.callers import Back, Caller
from tests.joined.shop import Order, Shop

pytestmark = pytest.mark.req("D5", "A1")


@pytest.fixture(autouse=True)
def _no_schedules(shop: Shop) -> Iterator[None]:
    shop.look("DELETE FROM dbqueue_schedules")
    yield
    shop.look("DELETE FROM dbqueue_schedules")


def names(shop: Shop) -> list[str]:
    """What another connection sees."""
    return [row[0] for row in shop.look("SELECT name FROM dbqueue_schedules ORDER BY name")]


def stored(shop: Shop, name: str) -> Any:
    return shop.look(f"SELECT spec, paused, payload FROM dbqueue_schedules WHERE name = '{name}'")[0]


def test_both_are_there_after_commit(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        caller.order(1)
        made = shop.queue.schedule("nightly", "0 3 * * *", shop.ship, Order(1))
        assert shop.queue.get_schedule("nightly") == made
        assert names(shop) == []
    caller.commit()
    assert (shop.orders(), names(shop)) == ([1], ["nightly"])


def test_neither_is_there_after_rollback(shop: Shop, caller: Caller) -> None:
    with using(caller.given):
        caller.order(1)
        shop.queue.schedule("nightly", "0 3 * * *", shop.ship, Order(1))
    caller.rollback()
    assert (shop.orders(), names(shop)) == ([], [])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_changes_end_with_the_callers_transaction(shop: Shop, caller: Caller, end: str) -> None:
    queue = shop.queue
    caller.rollback()
    for name in ("changed", "paused", "removed", "run"):
        queue.schedule(name, "0 3 * * *", shop.ship, Order(1))
    before = [stored(shop, name) for name in ("changed", "paused")]
    caller.begin()
    with using(caller.given):
        caller.order(1)
        queue.schedule("changed", "@every 5m", shop.ship, Order(2))
        queue.pause_schedule("paused")
        assert queue.unschedule("removed")
        assert queue.run_schedule("run").duplicate is False
        with pytest.raises(InvalidSpec):
            queue.schedule("wrong", "nonsense", shop.ship, Order(1))
        with pytest.raises(ScheduleNotFound):
            queue.reset_schedule("none")
        queue.resume_schedule("run")
        queue.reset_schedule("run")
    getattr(caller, end)()
    after = [stored(shop, name) for name in ("changed", "paused")]
    if end == "commit":
        assert (after[0][0], bool(after[1][1])) == ("@every 5m", True)
        assert (names(shop), shop.jobs(), shop.orders()) == (["changed", "paused", "run"], [1], [1])
    else:
        assert after == before
        assert (names(shop), shop.jobs(), shop.orders()) == (["changed", "paused", "removed", "run"], [], [])


def test_a_savepoint_takes_its_schedule_along(shop: Shop, caller: Caller) -> None:
    caller.order(1)
    with using(caller.given):
        shop.queue.schedule("kept", "0 3 * * *", shop.ship, Order(1))
        with caller.savepoint():
            shop.queue.schedule("gone", "0 3 * * *", shop.ship, Order(1))
            raise Back
    caller.commit()
    assert names(shop) == ["kept"]


def test_an_async_session_cannot_wait_for_a_schedule(shop: Shop, run: Run) -> None:
    async def scenario(given: AsyncGiven) -> None:
        with using(given):
            with pytest.raises(NotSupported, match="async"):
                shop.queue.schedule("nightly", "0 3 * * *", shop.ship, Order(1))
            assert shop.queue.get_schedule("nightly") is None

    run(scenario)
