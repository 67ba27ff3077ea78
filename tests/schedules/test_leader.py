"""One leader fires the schedules, for as long as its lock holds by the database's clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dbqueue import DBQueue, LeadershipLost, run_schedules
from tests.schedules.lab import Lab
from tests.waiting import wait_for

POLL = 0.05
DAY = 86_400.0


class Runner(threading.Thread):
    def __init__(self, queue: DBQueue, ttl: float) -> None:
        super().__init__(daemon=True)
        self.queue, self.ttl = queue, ttl
        self.asked = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            run_schedules(self.queue, self.asked, ttl=self.ttl, poll=POLL)
        except BaseException as error:
            self.error = error


@contextmanager
def running(lab: Lab, count: int, ttl: float) -> Iterator[list[Runner]]:
    runners = [Runner(lab.another_queue(), ttl) for _ in range(count)]
    for runner in runners:
        runner.start()
    try:
        yield runners
    finally:
        for runner in runners:
            runner.asked.set()
        for runner in runners:
            runner.join(10)
            assert not runner.is_alive()


def holders(lab: Lab) -> list[str]:
    return [str(row[0]) for row in lab.sql("SELECT owner FROM {locks}")]


@pytest.mark.req("A3", "A4")
def test_of_several_runners_one_leads_and_the_end_of_all_leaves_no_lock(lab: Lab) -> None:
    lab.kept("tick")
    with running(lab, 3, DAY) as runners:
        wait_for(lambda: len(holders(lab)) == 1)
        first = holders(lab)
        lab.later(minutes=5)
        wait_for(lambda: lab.count("tick") == 5)
        assert holders(lab) == first
    assert [runner.error for runner in runners] == [None] * 3
    assert holders(lab) == []
    assert len(set(lab.slots("tick"))) == 5


@pytest.mark.req("A3", "A4")
def test_a_leader_that_stops_hands_over_and_no_slot_is_lost(lab: Lab) -> None:
    lab.kept("tick")
    with running(lab, 1, DAY) as (leading,):
        wait_for(lambda: len(holders(lab)) == 1)
        first = holders(lab)
        with running(lab, 1, DAY):
            lab.later(minutes=2)
            wait_for(lambda: lab.count("tick") == 2)
            leading.asked.set()
            wait_for(lambda: holders(lab) not in ([], first))
            lab.later(minutes=3)
            wait_for(lambda: lab.count("tick") == 5)
    assert len(set(lab.slots("tick"))) == 5


@pytest.mark.req("A3", "A7", "H14")
def test_a_leader_whose_lock_ended_raises_and_fires_nothing_more(lab: Lab) -> None:
    lab.kept("tick")
    with running(lab, 1, 30.0) as (runner,):
        wait_for(lambda: len(holders(lab)) == 1)
        lab.later(minutes=10)  # as a process that was stopped for so long sees it
        runner.join(10)
        assert isinstance(runner.error, LeadershipLost)
        assert lab.count("tick") == 0
    with running(lab, 1, DAY):
        wait_for(lambda: lab.count("tick") == 10)


@pytest.mark.req("A3")
def test_a_leadership_that_another_took_over_is_told_in_the_transaction_that_fires(lab: Lab) -> None:
    from dbqueue import locks
    from dbqueue.runtime.leader import LEADER, Led

    lab.kept("tick")
    led = Led(lab.database, "first", locks.ttl_microseconds(30.0))
    assert led.acquire()
    beat = lab.beat()
    beat._sources[0] = led
    lab.settle(beat)
    lab.later(minutes=1)  # longer than it lasts
    with pytest.raises(LeadershipLost):
        beat.step()
    other = Led(lab.database, "second", locks.ttl_microseconds(DAY))
    assert other.acquire()
    with pytest.raises(LeadershipLost):
        beat.step()
    assert lab.count("tick") == 0
    led.release()
    assert holders(lab) == ["second"], LEADER
