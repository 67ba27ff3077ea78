"""Beats that do the same thing in the same instant, and people who change schedules meanwhile (A4, D16)."""

from __future__ import annotations

import random
import threading

import pytest

from dbqueue import events
from dbqueue.clock import SECOND
from tests.factory import run_together
from tests.schedules.lab import Lab, instant

pytestmark = pytest.mark.req("A4", "D16")

BEATS, SCHEDULES, ROUNDS = 4, 60, 6


def test_beats_that_begin_in_one_instant_share_what_is_due(lab: Lab) -> None:
    names = [f"s{n:02}" for n in range(SCHEDULES)]
    lab.kept(*names)
    beats = [lab.beat(lab.another_queue()) for _ in range(BEATS)]
    run_together([lambda beat=beat: lab.settle(beat) for beat in beats])  # type: ignore[misc]
    for minute in range(1, ROUNDS + 1):
        lab.at(f"2026-03-02 10:{minute:02}:00")
        run_together([lambda beat=beat: lab.settle(beat) for beat in beats])  # type: ignore[misc]
    lab.settle(*beats)
    expected = [instant(f"2026-03-02 10:{minute:02}:00") for minute in range(1, ROUNDS + 1)]
    for name in names:
        assert sorted(lab.sequences(name)) == expected
    assert len(lab.of(events.ScheduleFired)) == SCHEDULES * ROUNDS == sum(beat.fired for beat in beats)
    assert sum(schedule.fired for schedule in lab.queue.schedules()) == SCHEDULES * ROUNDS
    assert not lab.of(events.DatabaseTrouble)
    assert not lab.of(events.ScheduleBroken)  # nobody wrote what another one held


def test_people_change_schedules_while_beats_fire_them(lab: Lab) -> None:
    """Every slot of those that are left alone once; of the others none twice, and none that was not theirs."""
    still, moving = [f"still{n}" for n in range(10)], [f"moving{n}" for n in range(10)]
    lab.kept(*still, *moving)
    beats = [lab.beat(lab.another_queue()) for _ in range(3)]
    lab.settle(*beats)
    ended = threading.Event()

    def people(seed: int) -> None:
        chance, queue = random.Random(seed), lab.another_queue()
        while not ended.is_set():
            name = chance.choice(moving)
            what = chance.randrange(4)
            if what == 0:
                queue.unschedule(name)
            elif what == 1:
                queue.schedule(name, chance.choice(["* * * * *", "*/2 * * * *", "@every 90s"]), "raw", 1)
            elif queue.get_schedule(name) is None:
                queue.schedule(name, "* * * * *", "raw", chance.random())
            else:
                lab.sql("UPDATE {schedules} SET paused = :yes WHERE name = :name", yes=what == 2, name=name)

    def fire(beat_number: int) -> None:
        while not ended.is_set():
            beats[beat_number].step()

    def time_goes_by() -> None:
        try:
            for minute in range(1, 31):
                lab.at(f"2026-03-02 10:{minute:02}:00")
                lab.settle(extra)
        finally:
            ended.set()

    extra = lab.beat(lab.another_queue())
    run_together([time_goes_by, *(lambda n=n: fire(n) for n in range(3)), *(lambda n=n: people(n) for n in range(2))])  # type: ignore[misc]
    lab.settle(*beats)
    for name in still:
        assert sorted(lab.sequences(name)) == [instant("2026-03-02 10:00:00") + n * 60 * SECOND for n in range(1, 31)]
    for name in moving:
        found = lab.sequences(name)
        assert len(found) == len(set(found)), name
    assert not lab.of(events.DatabaseTrouble)
    assert not lab.of(events.ScheduleBroken)


def test_programs_that_start_with_the_same_declarations(lab: Lab) -> None:
    """Whoever comes first writes them; the others find them. Another order of declaration is no deadlock."""
    queues = []
    for n in range(6):
        queue = lab.another_queue()
        for name in sorted("abcdef", reverse=bool(n % 2)):
            queue.periodic(name, "0 * * * *", "raw", 1)
        queues.append(queue)
    run_together([queue.start_schedules for queue in queues])
    assert [schedule.name for schedule in lab.queue.schedules()] == list("abcdef")


def test_a_declaration_that_is_removed_while_it_is_written(lab: Lab) -> None:
    """It is there or it is not, and whoever declares it finds it either way."""
    declares, removes = lab.another_queue(), lab.another_queue()
    declares.periodic("some", "0 * * * *", "raw", 1)
    ended = threading.Event()

    def declare() -> None:
        try:
            for _ in range(150):
                assert declares.start_schedules() == []
        finally:
            ended.set()

    def remove() -> None:
        while not ended.is_set():
            removes.unschedule("some")

    run_together([declare, remove, remove])
    declares.start_schedules()
    assert [schedule.name for schedule in lab.queue.schedules()] == ["some"]
