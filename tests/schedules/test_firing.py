"""What a beat fires: each slot once, whatever the clock, the table and other beats do. The cases are those of docs/cases.md."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timezone

import pytest

from dbqueue import DBQueue, InvalidSpec, ScheduleConflict, cron, events, using
from dbqueue.clock import SECOND, to_instant
from dbqueue.schedules import CRON_SLOTS, EVERY_SLOTS
from tests.factory import now
from tests.schedules.lab import Lab, instant

pytestmark = pytest.mark.req("D16")


def minutes(day: str, first: int, last: int) -> list[str]:
    return [f"{day} {minute // 60:02}:{minute % 60:02}" for minute in range(first, last + 1)]


# -- the cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("A4")
def test_c43_three_beats_at_once(lab: Lab) -> None:
    lab.kept("c43")
    beats = [lab.beat(lab.another_queue()) for _ in range(3)]
    lab.run_until("2026-03-02 10:30:00", *beats)
    assert lab.slots("c43") == minutes("2026-03-02", 601, 630)
    assert not [event for event in lab.told if isinstance(event, (events.DatabaseTrouble, events.ScheduleBroken))]


@pytest.mark.req("A4")
def test_c44_beats_of_one_name(lab: Lab) -> None:
    """Nothing goes by the name, nor by who was there first: three that take themselves for the same one."""
    lab.kept("c44")
    beats = [lab.beat(lab.another_queue()) for _ in range(3)]
    for beat in beats:
        beat.name = "same"
    for minute in range(30):
        lab.later(minutes=1)
        if minute % 5 == 0:  # it dies, and another comes under its name
            beats[minute % 3].close()
            beats[minute % 3] = lab.beat(lab.another_queue())
            beats[minute % 3].name = "same"
        lab.settle(*beats)
    assert lab.slots("c44") == minutes("2026-03-02", 601, 630)


def test_c46_nobody_was_there_in_the_very_minute(lab: Lab) -> None:
    lab.kept("c46", spec="0 12 * * *")
    old = lab.beat()
    lab.run_until("2026-03-02 11:59:57", old)
    assert lab.slots("c46") == []
    lab.at("2026-03-02 12:00:02")
    lab.settle(lab.beat(lab.another_queue()))
    assert lab.slots("c46") == ["2026-03-02 12:00"]
    assert lab.queue.jobs()[0].created_at < datetime(2026, 3, 2, 12, 0, 5, tzinfo=timezone.utc)


def test_c48_a_new_entry_begins_with_its_first_slot(lab: Lab) -> None:
    lab.at("2026-03-02 07:59:41")
    lab.kept("c48", spec="0 8 * * *")
    lab.settle(beat := lab.beat())
    assert lab.slots("c48") == []
    lab.run_until("2026-03-02 08:00:30", beat)
    assert lab.slots("c48") == ["2026-03-02 08:00"]
    lab.kept("late", spec="0 8 * * *")
    lab.run_until("2026-03-03 07:59:00", lab.beat(poll=3600))
    assert lab.slots("late") == []
    lab.run_until("2026-03-03 08:00:30", beat)
    assert lab.slots("late") == ["2026-03-03 08:00"]


def test_c51_a_process_that_is_started_anew_each_day(lab: Lab) -> None:
    lab.kept("c51", spec="0 6 * * 1")
    for day in range(2, 23):
        beat = lab.beat(poll=3600)
        lab.run_until(f"2026-03-{day + 1:02} 03:00:00", beat)
        beat.close()
    assert lab.slots("c51") == ["2026-03-09 06:00", "2026-03-16 06:00"]
    lab.run_until("2026-03-23 06:00:01", lab.beat(poll=3600))
    assert lab.count("c51") == 3


@pytest.mark.parametrize("hours", [0.5, 48])
@pytest.mark.req("H14")
def test_c54_the_databases_clock_goes_back(lab: Lab, hours: float) -> None:
    """No slot twice, a warning, no busy loop; `schedules reset` is the way out."""
    lab.kept("c54", spec="*/5 * * * *")
    beat = lab.beat()
    lab.run_until("2026-03-02 10:10:00", beat)
    lab.later(hours=hours)
    lab.settle(beat)
    ahead = lab.slots("c54")
    assert len(ahead) == 2 + hours * 12
    lab.later(hours=-hours)
    lab.told.clear()
    beat._look_back_at = 0.0
    assert beat.step() > 1
    (told,) = lab.of(events.CursorsAhead)
    assert told.names == ("c54",)
    lab.run_until("2026-03-02 10:30:00", beat)
    assert lab.slots("c54") == ahead
    assert len(lab.of(events.CursorsAhead)) >= 1
    lab.queue.reset_schedule("c54")
    lab.run_until("2026-03-02 10:41:00", beat)
    assert (
        max(Counter(lab.slots("c54")).values()) == 1
    )  # the jobs of these slots are unfinished still, so they are there once
    soon = range(now(lab.database), now(lab.database) + 1800 * SECOND)
    for job in lab.queue.jobs(limit=1000):
        if job.sequence in soon:
            lab.queue.cancel(job.id)
    lab.queue.reset_schedule("c54")
    lab.run_until("2026-03-02 10:51:00", beat)
    found = Counter(lab.slots("c54"))
    twice = {slot for slot, count in found.items() if count == 2}
    assert twice == ({"2026-03-02 10:45", "2026-03-02 10:50"} if hours > 1 else set())
    assert max(found.values()) <= 2
    assert found["2026-03-02 10:50"]


@pytest.mark.req("H14")
def test_c54_a_machine_whose_clock_is_wrong_changes_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.kept("c54", spec="*/5 * * * *")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 1800)
    lab.run_until("2026-03-02 10:20:00", lab.beat())
    assert lab.slots("c54") == minutes("2026-03-02", 605, 620)[::5]


def test_c56_plain_sql_is_noticed(lab: Lab) -> None:
    lab.kept("c56")
    lab.sql("UPDATE {schedules} SET paused = :yes", yes=True)
    beat = lab.beat()
    lab.run_until("2026-03-02 10:02:30", beat)
    assert lab.slots("c56") == []
    lab.sql("UPDATE {schedules} SET paused = :no", no=False)
    lab.run_until("2026-03-02 10:04:30", beat)
    assert lab.slots("c56") == ["2026-03-02 10:03", "2026-03-02 10:04"]
    lab.sql("UPDATE {schedules} SET spec = '0 0 1 1 *'")
    lab.run_until("2026-03-02 10:10:30", beat)
    assert lab.count("c56") == 2
    lab.sql("UPDATE {schedules} SET spec = '0 10 * * *', timezone = 'Europe/Berlin'")  # nine o'clock here, and past
    lab.run_until("2026-03-02 10:20:00", beat)
    assert lab.count("c56") == 2
    lab.run_until("2026-03-03 09:30:00", lab.beat(poll=600))
    assert lab.slots("c56")[2:] == ["2026-03-03 09:00"]
    columns = "owner, name, spec, timezone, catch_up, digest, target, queue, payload, priority, max_attempts, anchor"
    lab.sql(
        f"INSERT INTO {{schedules}} ({columns}, last_slot, created_at, updated_at) SELECT '', 'copy', '* * * * *', 'UTC', catch_up, "
        "'', target, queue, payload, priority, max_attempts, anchor, :now, :now, :now FROM {schedules}",
        now=instant("2026-03-03 09:30:00"),
    )
    lab.run_until("2026-03-03 09:32:00", beat)
    assert lab.slots("copy") == ["2026-03-03 09:31", "2026-03-03 09:32"]
    lab.sql("DELETE FROM {schedules}")
    lab.run_until("2026-03-03 09:40:00", beat)
    assert lab.count("copy") == 2


def test_a_spec_that_is_changed_when_the_old_one_is_due_does_not_fire_the_past(lab: Lab) -> None:
    """Between the beat's look and its locks somebody may write."""
    lab.kept("late", spec="0 12 * * *")
    beat = lab.beat()
    lab.settle(beat)
    lab.at("2026-03-02 12:00:01")
    lab.sql("UPDATE {schedules} SET spec = '* * * * *'")
    assert beat._connection.session is not None
    assert beat._fire(beat._connection.session, beat._sources[0]) is False
    lab.settle(beat)
    assert lab.slots("late") == []
    lab.run_until("2026-03-02 12:02:00", beat)
    assert lab.slots("late") == ["2026-03-02 12:01", "2026-03-02 12:02"]


def test_c57_a_declaration_that_is_gone_is_named_and_ends_by_hand(lab: Lab) -> None:
    """A row may be another program's: a beat without its code says so, and goes on firing it until somebody removes it."""

    def code(*names: str) -> DBQueue:
        queue = lab.another_queue()
        for name in names:
            queue.periodic(name, "* * * * *", "raw", 1)
        return queue

    assert code("keep", "gone").start_schedules() == []
    lab.run_until("2026-03-02 10:01:00", lab.beat())
    assert (lab.count("keep"), lab.count("gone")) == (1, 1)
    lab.kept("own")
    assert code("keep").start_schedules() == ["gone"]
    assert lab.queue.unschedule("gone")
    lab.run_until("2026-03-02 10:04:00", lab.beat())
    assert (lab.count("keep"), lab.count("gone"), lab.count("own")) == (4, 1, 3)
    assert code("keep").start_schedules() == []


def test_c59_waking_a_hair_too_early(lab: Lab) -> None:
    lab.kept("c59")
    beat = lab.beat()
    lab.settle(beat)
    for when in ("10:00:59.985", "10:00:59.995", "10:00:59.999", "10:01:00", "10:01:00.001", "10:01:00.400"):
        lab.at(f"2026-03-02 {when}")
        pause = beat.step()
        assert pause < 0.02 or now(lab.database) >= instant("2026-03-02 10:01:00")
    lab.settle(beat)
    assert lab.slots("c59") == ["2026-03-02 10:01"]
    assert to_instant(lab.queue.jobs()[0].created_at) >= instant("2026-03-02 10:01:00")


def test_c60_very_many_at_once(lab: Lab) -> None:
    names = [f"c60-{n:04}" for n in range(700)]  # more than one transaction takes
    with lab.database.transaction() as session, using(session.connection):
        lab.kept(*names, spec="0 1 * * *")
    lab.at("2026-03-03 00:59:58")
    beat = lab.beat()
    lab.settle(beat)
    lab.at("2026-03-03 01:00:00")
    began = time.monotonic()
    lab.settle(beat)
    assert time.monotonic() - began < 10
    assert [lab.count(name) for name in names] == [1] * len(names)


def test_c61_c71_a_broken_row_is_told_once_and_the_others_go_on(lab: Lab) -> None:
    lab.kept("good", "mangled", "never", "zone", "policy", "half", "crash")
    lab.sql("UPDATE {schedules} SET spec = 'nonsense' WHERE name = 'mangled'")
    lab.sql("UPDATE {schedules} SET spec = '0 0 30 2 *' WHERE name = 'never'")
    lab.sql("UPDATE {schedules} SET timezone = 'Mars/Olympus' WHERE name = 'zone'")
    lab.sql("UPDATE {schedules} SET catch_up = 'perhaps' WHERE name = 'policy'")
    lab.sql("UPDATE {schedules} SET queue = NULL WHERE name = 'half'")
    lab.sql("UPDATE {schedules} SET on_crash = 77 WHERE name = 'crash'")
    beat = lab.beat()
    lab.run_until("2026-03-02 10:05:00", beat)
    broken = {"mangled", "never", "zone", "policy", "half", "crash"}
    assert lab.slots("good") == minutes("2026-03-02", 601, 605)
    assert sorted(event.name for event in lab.of(events.ScheduleBroken)) == sorted(broken)
    assert [lab.count(name) for name in broken] == [0] * len(broken)
    shown = {schedule.name: schedule.error for schedule in lab.queue.schedules()}
    assert {name for name, error in shown.items() if error} == broken
    assert "catch_up" in str(shown["policy"])
    assert "queue" in str(shown["half"])

    # Declared again, or mended by hand, they fire: what was missed is made up for where only the spec was well all the time.
    lab.sql("UPDATE {schedules} SET queue = 'raw' WHERE name = 'half'")
    lab.sql("UPDATE {schedules} SET timezone = 'UTC' WHERE name = 'zone'")
    lab.kept("mangled", "policy")
    lab.run_until("2026-03-02 10:07:30", beat)
    assert lab.slots("half") == minutes("2026-03-02", 601, 607)
    assert lab.slots("policy") == minutes("2026-03-02", 601, 607)
    assert lab.slots("zone") == lab.slots("mangled") == minutes("2026-03-02", 606, 607)
    assert lab.queue.get_schedule("half").error is None  # type: ignore[union-attr]


def test_c71_a_date_that_does_not_exist_is_refused_at_once(lab: Lab) -> None:
    began = time.monotonic()
    for spec in ("0 0 31 4 *", "0 0 30 2 *"):
        with pytest.raises(InvalidSpec):
            lab.kept("c71", spec=spec)
    assert time.monotonic() - began < 0.1
    assert lab.queue.schedules() == []


def test_zones_that_are_missing_on_a_machine_cost_nothing_but_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever installs them later finds every slot made up for, and no beat that could read the row is kept from firing."""
    lab.kept("zoned", timezone="Europe/Berlin")
    beat = lab.beat()
    lab.settle(beat)
    known = cron.ZoneInfo

    def missing(name: str) -> object:
        raise KeyError(name)

    monkeypatch.setattr(cron, "ZoneInfo", missing)
    lab.run_until("2026-03-02 10:05:00", beat)
    assert (lab.count("zoned"), len(lab.of(events.ScheduleBroken))) == (0, 1)
    monkeypatch.setattr(cron, "ZoneInfo", known)
    lab.run_until("2026-03-02 10:06:30", beat)
    assert lab.slots("zoned") == minutes("2026-03-02", 601, 606)


def test_c79_a_yearly_entry_waits_for_its_day(lab: Lab) -> None:
    lab.at("2026-07-11 10:00:00")
    lab.kept("c79", spec="0 0 1 2 *")
    beat = lab.beat(poll=3600)
    lab.run_until("2026-07-14 10:00:00", beat)
    assert lab.slots("c79") == []
    lab.at("2027-01-31 23:59:50")
    lab.run_until("2027-02-01 00:00:50", beat)
    assert lab.slots("c79") == ["2027-02-01 00:00"]


# -- missed slots ------------------------------------------------------------------------------------------------------

THREE_DAYS = ["2026-03-03 08:00", "2026-03-04 08:00", "2026-03-05 08:00"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, THREE_DAYS),
        ({"catch_up": "latest"}, THREE_DAYS[2:]),
        ({"catch_up": "skip"}, []),
        ({"max_age": 30 * 3600}, THREE_DAYS[1:]),
        ({"max_age": 3600}, []),
        ({"catch_up": "latest", "max_age": 3600}, []),
        ({"catch_up": "latest", "max_age": 3 * 3600}, THREE_DAYS[2:]),
        ({"catch_up": "skip", "max_age": 30 * 3600}, []),
    ],
)
def test_three_days_without_a_beat(lab: Lab, options: dict[str, object], expected: list[str]) -> None:
    lab.kept("daily", spec="0 8 * * *", **options)
    lab.settle(lab.beat())
    lab.at("2026-03-05 10:00:00")
    lab.settle(lab.beat(lab.another_queue()))
    assert lab.slots("daily") == expected
    lab.run_until("2026-03-06 08:00:01", lab.beat(poll=3600))
    assert lab.slots("daily") == [*expected, "2026-03-06 08:00"]


def test_what_is_less_than_a_minute_late_is_never_skipped(lab: Lab) -> None:
    lab.kept("often", spec="@every 10s", catch_up="skip")
    lab.kept("latest", spec="@every 10s", catch_up="latest")
    beat = lab.beat()
    lab.settle(beat)
    lab.at("2026-03-02 10:02:05")
    lab.settle(beat)
    assert lab.slots("often")[:2] == ["2026-03-02 10:01:10", "2026-03-02 10:01:20"]
    assert lab.count("often") == 6
    assert lab.slots("latest") == ["2026-03-02 10:02"]


@pytest.mark.req("A3")
def test_a_round_takes_256_minutes_and_the_next_round_the_rest(lab: Lab) -> None:
    lab.kept("c", "d")
    beat = lab.beat()
    lab.settle(beat)
    lab.later(minutes=600)
    assert beat.step() == 0
    assert lab.count("c") == CRON_SLOTS
    assert beat.step() == 0
    assert lab.count("c") == 2 * CRON_SLOTS
    lab.settle(beat)
    assert lab.slots("c") == lab.slots("d") == minutes("2026-03-02", 601, 1200)


@pytest.mark.req("A3", "A1")
def test_an_interval_fires_64_boundaries_and_skips_the_rest(lab: Lab) -> None:
    lab.queue.schedule("every", "@every 90s", "raw", 1)
    beat = lab.beat()
    lab.settle(beat)
    lab.later(days=1)
    lab.settle(beat)
    found = [slot - instant("2026-03-02 10:00:00") for slot in sorted(lab.sequences("every"))]
    assert [slot // 1_000_000 for slot in found] == [90 * n for n in range(1, EVERY_SLOTS + 1)]
    lab.later(seconds=90)
    lab.settle(beat)
    assert lab.count("every") == EVERY_SLOTS + 1
    last = max(lab.sequences("every")) - instant("2026-03-02 10:00:00")
    assert last == 86_400_000_000 + 90_000_000  # counted from the anchor, and not from when it was noticed


def test_big_payloads_make_small_rounds(lab: Lab) -> None:
    lab.queue.schedule("big", "* * * * *", "raw", "x" * 500_000)
    beat = lab.beat()
    lab.settle(beat)
    lab.later(minutes=40)
    assert beat.step() == 0
    assert 16 <= lab.count("big") < 40
    lab.settle(beat)
    assert lab.slots("big") == minutes("2026-03-02", 601, 640)


# -- paused, resumed, changed ------------------------------------------------------------------------------------------


def test_paused_slots_pass_by(lab: Lab) -> None:
    lab.kept("some")
    beat = lab.beat()
    lab.run_until("2026-03-02 10:02:00", beat)
    lab.queue.pause_schedule("some")
    lab.run_until("2026-03-02 10:10:00", beat)
    assert lab.queue.get_schedule("some").next_slot is None  # type: ignore[union-attr]
    lab.queue.resume_schedule("some")
    lab.run_until("2026-03-02 10:12:00", beat)
    assert lab.slots("some") == [*minutes("2026-03-02", 601, 602), *minutes("2026-03-02", 611, 612)]


def test_what_was_paused_while_no_beat_ran_is_not_made_up_for(lab: Lab) -> None:
    lab.kept("some")
    lab.settle(lab.beat())
    lab.queue.pause_schedule("some")
    lab.later(hours=3)
    lab.queue.resume_schedule("some")
    lab.settle(lab.beat())
    assert lab.slots("some") == []
    lab.run_until("2026-03-02 13:01:30", lab.beat())
    assert lab.slots("some") == ["2026-03-02 13:01"]


@pytest.mark.req("A1")
def test_a_changed_payload_keeps_the_cursor_and_a_changed_spec_begins_now(lab: Lab) -> None:
    lab.kept("some", spec="0 * * * *")
    lab.settle(lab.beat())
    lab.at("2026-03-02 12:30:00")
    lab.queue.schedule("some", "0 * * * *", "raw", 2)
    lab.settle(lab.beat())
    assert lab.slots("some") == ["2026-03-02 11:00", "2026-03-02 12:00"]
    lab.at("2026-03-02 14:30:20")
    lab.queue.schedule("some", "* * * * *", "raw", 2)
    lab.settle(beat := lab.beat())
    assert lab.count("some") == 2
    lab.run_until("2026-03-02 14:31:00", beat)
    assert lab.slots("some")[2:] == ["2026-03-02 14:31"]
    cursor = lab.queue.get_schedule("some").last_slot  # type: ignore[union-attr]
    lab.later(hours=-2)
    lab.queue.schedule("some", "*/2 * * * *", "raw", 2)
    assert lab.queue.get_schedule("some").last_slot == cursor  # type: ignore[union-attr]


# -- daylight saving ---------------------------------------------------------------------------------------------------


@pytest.mark.req("D15")
def test_the_hour_that_the_clocks_skip_and_the_one_that_they_repeat(lab: Lab) -> None:
    lab.at("2026-03-28 12:00:00")
    lab.kept("night", spec="30 2 * * *", timezone="Europe/Berlin")
    lab.kept("hourly", spec="0 * * * *", timezone="Europe/Berlin")
    lab.run_until("2026-03-30 12:00:00", lab.beat(poll=3600))
    assert lab.slots("night") == ["2026-03-29 01:00", "2026-03-30 00:30"]
    assert len(lab.slots("hourly")) == len(set(lab.slots("hourly"))) == 48
    lab.at("2026-10-24 12:00:00")
    lab.queue.reset_schedule("night")
    lab.queue.reset_schedule("hourly")
    lab.run_until("2026-10-26 12:00:00", lab.beat(poll=3600))
    assert lab.slots("night")[2:] == ["2026-10-25 00:30", "2026-10-26 01:30"]
    assert len(lab.slots("hourly")) == len(set(lab.slots("hourly"))) == 48 + 47


@pytest.mark.parametrize("zone", ["UTC", "Europe/Paris"])
def test_c126_the_end_of_summer_time_on_the_beats_machine(lab: Lab, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        lab.at("2026-10-24 22:00:00")
        lab.kept("c126", spec="20 * * * *")
        lab.run_until("2026-10-25 05:00:00", lab.beat(poll=600))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert lab.slots("c126") == ["2026-10-24 22:20", "2026-10-24 23:20", *(f"2026-10-25 0{n}:20" for n in range(5))]


# -- versions ----------------------------------------------------------------------------------------------------------


def test_another_version_refuses_to_start_and_adopting_keeps_the_cursor(lab: Lab) -> None:
    def code(payload: int, spec: str = "0 * * * *") -> DBQueue:
        queue = lab.another_queue()
        queue.periodic("some", spec, "raw", payload)
        queue.periodic(f"own {payload}", "0 * * * *", "raw", payload)
        return queue

    assert code(1).start_schedules() == []
    lab.settle(lab.beat())
    with pytest.raises(ScheduleConflict, match=r"'some'.*dbqueue schedules adopt"):
        code(2).start_schedules()
    assert [schedule.name for schedule in lab.queue.schedules()] == ["own 1", "some"]  # nothing of the refused version
    assert code(1).start_schedules() == []
    lab.at("2026-03-02 11:30:00")
    assert {schedule.name for schedule in code(2).adopt_schedules()} == {"some", "own 2"}
    lab.settle(lab.beat())
    assert lab.slots("some") == ["2026-03-02 11:00"]
    assert lab.slots("own 2") == []
    with pytest.raises(ScheduleConflict):
        code(1).start_schedules()
    assert code(2).start_schedules() == ["own 1"]


# -- keys and history --------------------------------------------------------------------------------------------------


@pytest.mark.req("D8")
def test_a_key_lets_no_second_job_in_while_one_is_unfinished(lab: Lab) -> None:
    lab.kept("some", key="one")
    lab.settle(lab.beat())
    lab.later(minutes=5)
    lab.settle(beat := lab.beat())
    assert lab.slots("some") == ["2026-03-02 10:01"]
    assert lab.queue.get_schedule("some").fired == 1  # type: ignore[union-attr]
    lab.queue.cancel(lab.queue.jobs()[0].id)
    lab.run_until("2026-03-02 10:06:00", beat)
    assert lab.slots("some") == ["2026-03-02 10:01", "2026-03-02 10:06"]


def test_purging_the_history_does_not_disturb_a_schedule(lab: Lab) -> None:
    lab.kept("some")
    beat = lab.beat()
    lab.run_until("2026-03-02 10:03:00", beat)
    for job in lab.queue.jobs():
        lab.queue.cancel(job.id)
    lab.later(seconds=1)
    assert lab.queue.purge(["cancelled"]) == 3
    lab.settle(beat)
    assert lab.slots("some") == []
    lab.run_until("2026-03-02 10:04:00", beat)
    assert lab.slots("some") == ["2026-03-02 10:04"]


@pytest.mark.req("A5")
def test_a_fired_job_is_an_ordinary_one(lab: Lab) -> None:
    lab.kept("plain")
    lab.kept("own", priority=8, max_attempts=7, key="k")
    lab.run_until("2026-03-02 10:01:00", lab.beat())
    found = {job.source: job for job in lab.queue.jobs()}
    (fired, _) = lab.of(events.ScheduleFired)
    assert found[fired.name].id == fired.id
    plain, own = found["plain"], found["own"]
    assert (plain.state, plain.queue, plain.max_attempts, plain.attempt, plain.priority) == ("pending", "raw", 3, 0, 0)
    assert (own.max_attempts, own.priority, own.key) == (7, 8, "k")
    claimed = lab.queue.claim("raw", "me", lease=60)
    assert claimed is not None
    assert claimed.payload == 1
    claimed.ack()


def test_what_an_idle_beat_asks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One statement a look, whatever the number of schedules, and a second one each minute."""
    lab.kept(*(f"s{n}" for n in range(50)), spec="0 0 1 1 *")
    beat = lab.beat(poll=1.0)
    lab.settle(beat)
    session, sent = beat._connection.session, list[str]()
    execute = session.execute  # type: ignore[union-attr]

    def counted(statement: str, params: object = None) -> object:
        sent.append(statement)
        return execute(statement, params)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "execute", counted)
    for _ in range(10):
        assert 0.9 < beat.step() <= 1.0
    assert len(sent) == 10
    beat._look_back_at = 0.0
    beat.step()
    beat.step()
    assert len(sent) == 13
