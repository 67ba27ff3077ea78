"""Entries of a Celery app in beats of this process, on a clock that the test moves."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import kombu
import pytest
from celery import Celery, Task, signals
from celery.beat import BeatLazyFunc
from celery.beat import Scheduler as CelerysScheduler
from celery.schedules import crontab, schedule

from dbqueue import DBQueue, events, owners
from dbqueue.celery_beat.scheduler import Scheduler, source_of
from dbqueue.clock import SECOND, to_instant
from dbqueue.errors import ConfigError, NotSupported, ScheduleNotFound
from tests.beat.conftest import TASK, Beats, idle, slot_id
from tests.doors.conftest import Run
from tests.doors.conftest import cli as cli

EVERY = {"task": TASK, "schedule": 60}
MINUTELY = {"task": TASK, "schedule": crontab()}


# -- what is sent, and when --------------------------------------------------------------------------------------------


@pytest.mark.req("C7", "A4")
def test_an_entry_begins_when_it_is_first_seen(beats: Beats) -> None:
    """C48. A new daily entry of RedBeat fired as soon as the scheduler started. Here an interval first comes after one interval, and a
    crontab with its next slot."""
    beat = beats.beat(
        {"every": EVERY, "minutely": MINUTELY, "daily": {"task": TASK, "schedule": crontab(hour=0, minute=0)}}
    )
    idle(beat)
    beats.pass_by(30, beat)
    assert beats.sent() == []
    beats.pass_by(30, beat)
    assert len(beats.sent()) == 2
    assert beats.entry("daily").fired == 0


@pytest.mark.req("C7")
def test_the_id_of_a_task_follows_from_entry_and_slot(beats: Beats) -> None:
    own = {"task": TASK, "schedule": 60, "options": {"task_id": "mine"}}
    beat = beats.beat({"minutely": MINUTELY, "own": own})
    idle(beat)
    beats.pass_by(60, beat)
    slot = to_instant(beats.entry("minutely").last_slot)
    assert slot % (60 * SECOND) == 0
    assert sorted(beats.sent()) == sorted(["mine", slot_id("minutely", slot)])


@pytest.mark.req("C7")
def test_a_message_is_the_one_that_celerys_scheduler_sends(beats: Beats) -> None:
    """Positional and named arguments, options, headers: compared with what Celery's own scheduler sends for the same entries."""
    options = {"queue": "q", "priority": 3, "expires": 3600, "headers": {"mine": 1}, "countdown": 100, "link": None}
    given = {
        "known": {"task": TASK, "schedule": 60, "args": (1, [2]), "kwargs": {"a": {"b": None}}, "options": options},
        "unknown": {"task": "nobody.knows", "schedule": 60, "args": (7,), "options": {"queue": "q", "priority": 5}},
        "lazy": {
            "task": TASK,
            "schedule": 60,
            "args": (BeatLazyFunc(int, "8"),),
            "options": {"queue": "q", "priority": 7},
        },
    }
    app = beats.app(given)
    idle(beats.beat(app))
    beats.pass_by(60, *beats.beats)
    theirs = CelerysScheduler(app)
    for entry in list(theirs.schedule.values()):
        theirs.apply_async(entry, producer=theirs.producer, advance=False)
    theirs.close()
    found: dict[int, list[Any]] = {}
    with kombu.Connection(beats.broker_url) as connection:
        for message in _messages(connection, 6):
            headers = dict(message.headers)
            del headers["id"], headers["root_id"]
            for name in ("expires", "eta"):  # counted from when it was sent
                headers[name] = headers[name] is not None
            found.setdefault(message.properties["priority"], []).append((headers, message.body))
    assert sorted(found) == [3, 5, 7]
    for ours, same in found.values():
        assert ours == same
    assert (found[3][0][0]["mine"], found[3][0][0]["eta"], found[3][0][0]["expires"]) == (1, True, True)


def _messages(connection: kombu.Connection, count: int) -> list[Any]:
    channel, found = connection.default_channel, []
    deadline = time.monotonic() + 30
    while len(found) < count:
        message = channel.basic_get("q")
        if message is None:
            assert time.monotonic() < deadline, f"only {len(found)} messages came"
            channel.station.run(
                lambda s: s.execute(
                    channel.station.dialect.portable(
                        "UPDATE {jobs} SET ready_at = 1 WHERE state = 0 AND ready_at IS NULL"
                    )
                )
            )
            continue
        found.append(channel.Message(message, channel=channel) if isinstance(message, dict) else message)
        channel.basic_ack(found[-1].delivery_tag)
    return found


@pytest.mark.req("C7")
def test_lazy_arguments_are_called_for_each_slot(beats: Beats) -> None:
    calls = iter(range(100))
    beat = beats.beat({"lazy": {**EVERY, "args": (BeatLazyFunc(calls.__next__),), "kwargs": {"n": BeatLazyFunc(int)}}})
    idle(beat)
    for _ in range(3):
        beats.pass_by(60, beat)
    assert beats.args() == [[0], [1], [2]]


@pytest.mark.req("C7")
@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, [10]),
        ({"dbqueue_catch_up": "all"}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"dbqueue_catch_up": "all", "dbqueue_max_age": 90}, [9, 10]),
        ({"dbqueue_catch_up": "skip"}, [10]),
    ],
)
def test_missed_slots(beats: Beats, options: dict[str, Any], slots: list[int]) -> None:
    """Once for all of them, as Celery does it, unless the entry says otherwise."""
    beat = beats.beat({"minutely": {**MINUTELY, "options": options}})
    idle(beat)
    first = to_instant(beats.entry("minutely").last_slot)
    beats.pass_by(600, beat)
    assert beats.sent() == [slot_id("minutely", first + n * 60 * SECOND) for n in slots]
    beats.pass_by(60, beat)
    assert beats.sent()[len(slots) :] == [slot_id("minutely", first + 11 * 60 * SECOND)]


@pytest.mark.req("C7", "H14")
def test_a_fraction_of_a_second_and_a_relative_interval(beats: Beats) -> None:
    beats.set_clock("2026-03-02 10:00:01")
    beat = beats.beat(
        {
            "short": {"task": TASK, "schedule": 7.5},
            "hourly": {"task": TASK, "schedule": timedelta(hours=1), "relative": True},
        }
    )
    idle(beat)
    for _ in range(8):
        beats.pass_by(8, beat)
    assert beats.entry("short").fired == 8
    assert len(set(beats.sent())) == 8
    for _ in range(13):
        beats.pass_by(300, beat)  # it is asked every five minutes
    assert beats.entry("hourly").fired == 1
    assert beats.entry("hourly").last_slot.minute < 6


@pytest.mark.req("C7")
def test_slots_in_summer_time(beats: Beats, monkeypatch: pytest.MonkeyPatch) -> None:
    """C126. Celery's beat stopped sending an hourly entry when the clocks went back. In UTC nothing happens then, whatever the machine's
    zone; on a wall clock the hour that comes twice counts once."""
    monkeypatch.setenv("TZ", "Europe/Paris")
    time.tzset()
    try:
        beats.set_clock("2026-10-24T22:00:01")
        utc, paris = (
            beats.beat(beats.app({"hourly": {"task": TASK, "schedule": crontab(minute=20)}}, name, timezone=zone))
            for name, zone in (("shop", None), ("paris", "Europe/Paris"))
        )
        fired = []
        for beat in (utc, paris):
            idle(beat)
        for _ in range(7):
            beats.pass_by(3600, utc, paris)
            fired.append((beats.entry("hourly").fired, beats.entry("hourly", "paris").fired))
        assert fired == [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 6)]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.req("C7", "H14")
def test_the_database_clock_goes_back(beats: Beats) -> None:
    """C54. Celery's beat fell silent, or sent again. A slot that was sent is not sent again; the others come in their time."""
    beat = beats.beat({"minutely": MINUTELY, "odd": {"task": TASK, "schedule": 30.5}})
    idle(beat)
    beats.pass_by(600, beat)
    before = beats.sent()
    beats.pass_by(-540, beat)
    for _ in range(8):
        beats.pass_by(60, beat)
    assert beats.sent() == before
    beats.pass_by(121, beat)
    assert len(beats.sent()) > len(before)
    assert len(set(beats.sent())) == len(beats.sent())


@pytest.mark.req("C7")
def test_a_yearly_entry_is_due_once(beats: Beats) -> None:
    """C79. Celery's beat took a yearly entry to be months late, and sent it again and again."""
    beats.set_clock("2026-12-31T23:59:01")
    beat = beats.beat(
        {"yearly": {"task": TASK, "schedule": crontab(minute=0, hour=0, day_of_month=1, month_of_year=1)}}
    )
    idle(beat)
    for _ in range(200):
        beats.pass_by(86_400, beat)
    assert beats.entry("yearly").fired == 1


@pytest.mark.req("C7", "A4")
def test_all_of_many_entries_are_sent(beats: Beats) -> None:
    """C60. Procrastinate, with many entries: some daily ones were never sent. They are written in batches, each with its cursors."""
    beat = beats.beat({f"e{n}": {**MINUTELY, "args": (n,)} for n in range(700)})
    idle(beat)
    beats.pass_by(60, beat)
    assert sorted(args[0] for args in beats.args()) == list(range(700))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def _raise(text: str) -> None:
    raise RuntimeError(text)


class Broken(schedule):
    def is_due(self, last_run_at: Any) -> Any:
        raise RuntimeError("secret-of-the-schedule")


@pytest.mark.req("C7", "D20")
def test_an_error_in_one_entry_is_its_own(beats: Beats, caplog: pytest.LogCaptureFixture) -> None:
    """C61. One broken entry kept Celery's beat from starting. It is set aside with its error, tried again a minute later, and the others
    go on. What was to be sent is never told."""
    state = {"broken": True}

    def lazy() -> str:
        return _raise("secret-of-lazy") or "" if state["broken"] else "cured"

    beat = beats.beat(
        {
            "good": EVERY, "lazy": {**EVERY, "args": (BeatLazyFunc(lazy),)}, "broken": {"task": TASK, "schedule": Broken(60)},
            "bytes": {**EVERY, "args": ("secret-of-args", object()), "options": {"serializer": "json"}},
            "nowhere": {**EVERY, "options": {"exchange": "nowhere", "routing_key": "secret-key"}},
        }
    )  # fmt: skip
    idle(beat)
    with caplog.at_level(logging.DEBUG):
        beats.pass_by(60, beat)
    assert beats.entry("good").fired == 1
    errors = {name: beats.entry(name).error for name in ("lazy", "broken", "bytes", "nowhere")}
    assert all(errors.values()), errors
    assert (errors["lazy"] or "").startswith("RuntimeError")
    assert (errors["nowhere"] or "").startswith("Unroutable")
    assert {event.name for event in beats.broken} == set(errors)
    assert (
        "secret"
        not in f"{errors}{beats.broken}{[r.getMessage() for r in caplog.records if r.name.startswith('dbqueue')]}"
    )
    assert "in lazy" in caplog.text  # where it was raised
    state["broken"] = False
    beats.pass_by(61, beat)
    assert beats.entry("lazy").error is None
    assert beats.args().count(["cured"]) == 1
    assert beats.entry("good").fired == 2
    assert len([event for event in beats.broken if event.name == "bytes"]) == 1  # told once


@pytest.mark.req("C7")
def test_an_error_in_the_middle_of_missed_slots_loses_none(beats: Beats) -> None:
    calls = iter([1, 2, None, 3, 4, 5])

    def lazy() -> int:
        number = next(calls)
        return number if number is not None else _raise("no") or 0

    beat = beats.beat({"all": {**MINUTELY, "args": (BeatLazyFunc(lazy),), "options": {"dbqueue_catch_up": "all"}}})
    idle(beat)
    first = to_instant(beats.entry("all").last_slot)
    beats.pass_by(180, beat)
    assert beats.sent() == []  # the round was given up before anything was sent
    calls = iter([1, 2, 3, 4, 5, 6])
    beats.pass_by(61, beat)
    assert beats.sent() == [slot_id("all", first + n * 60 * SECOND) for n in range(1, 5)]


class Sometimes:
    """Cannot be written by JSON the ``bad``-th time."""

    def __init__(self, bad: int) -> None:
        self.asked, self.bad = 0, bad

    def __call__(self) -> Any:
        self.asked += 1
        return object() if self.asked == self.bad else self.asked


@pytest.mark.req("C7")
def test_slots_before_the_one_that_cannot_be_sent_are_sent(beats: Beats) -> None:
    lazy = Sometimes(3)
    beat = beats.beat({"all": {**MINUTELY, "args": (BeatLazyFunc(lazy),), "options": {"dbqueue_catch_up": "all"}}})
    idle(beat)
    first = to_instant(beats.entry("all").last_slot)
    beats.pass_by(240, beat)
    assert beats.sent() == [slot_id("all", first + n * 60 * SECOND) for n in (1, 2)]
    assert beats.entry("all").error
    beats.pass_by(61, beat)
    assert beats.sent() == [slot_id("all", first + n * 60 * SECOND) for n in (1, 2, 3, 4, 5)]


@pytest.mark.req("C7", "A4", "D16")
def test_cursor_and_message_are_written_together_or_not_at_all(beats: Beats) -> None:
    """C49, C53. A crash between the two sent a slot again, or counted one as done that was not sent. The database refuses each of the
    two in turn."""
    beat = beats.beat({"minutely": MINUTELY, "other": {**EVERY, "task": "other.task"}})
    idle(beat)
    for table, condition in (
        ("jobs", "NEW.target LIKE '%note'"),
        ("schedules", "NEW.name = 'minutely' AND NEW.fired > OLD.fired"),
    ):
        _refuse(beats.queue, table, condition)
        beats.pass_by(60, beat)
        assert beats.sent() == []
        assert beats.entry("minutely").fired == 0
        assert beats.entry("minutely").error
        _allow(beats.queue, table)
    assert beats.entry("other").fired == 2
    beats.pass_by(61, beat)
    assert len(beats.sent()) == beats.entry("minutely").fired == 1


def _refuse(queue: DBQueue, table: str, condition: str) -> None:
    name, kind = f"dbqueue_{table}", "INSERT" if table == "jobs" else "UPDATE"
    if queue.database.dialect.name == "sqlite":
        texts = [
            f"CREATE TRIGGER refuse_{table} BEFORE {kind} ON {name} WHEN {condition} BEGIN SELECT RAISE(ABORT, 'no'); END"
        ]
    else:
        texts = [
            f"CREATE FUNCTION refuse_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF {condition} THEN RAISE EXCEPTION 'no'; "
            "END IF; RETURN NEW; END $$",
            f"CREATE TRIGGER refuse_{table} BEFORE {kind} ON {name} FOR EACH ROW EXECUTE FUNCTION refuse_{table}()",
        ]
    for text in texts:
        queue.database.run(lambda s, text=text: s.execute(text))  # type: ignore[misc]


def _allow(queue: DBQueue, table: str) -> None:
    on = "" if queue.database.dialect.name == "sqlite" else f" ON dbqueue_{table}"
    queue.database.run(lambda s: s.execute(f"DROP TRIGGER refuse_{table}{on}"))


@pytest.mark.req("C7")
def test_a_lazy_argument_may_use_the_database(beats: Beats) -> None:
    """It is called outside of the block in which messages are gathered: a beat's transaction is not for others. (On SQLite it has the one
    write lock meanwhile.)"""
    other = DBQueue(beats.queue.settings.url)

    def lazy() -> int:
        if other.database.dialect.name != "sqlite":
            other.schedule("by lazy", "0 0 1 1 *", "raw", {})
        return len(other.schedules())

    try:
        beat = beats.beat({"lazy": {**EVERY, "args": (BeatLazyFunc(lazy),)}})
        idle(beat)
        beats.pass_by(60, beat)
        assert beats.args() == [[2 if other.database.dialect.name == "sqlite" else 3]]  # Celery's own entry too
    finally:
        other.close()


# -- whose entries -----------------------------------------------------------------------------------------------------


@pytest.mark.req("C7", "A4")
def test_any_number_of_copies(beats: Beats) -> None:
    """C43. Two schedulers at once sent every periodic task twice. Copies of one version share the entries."""
    entries = {f"e{n}": MINUTELY for n in range(20)}
    copies = [beats.beat(entries) for _ in range(3)]
    for copy in copies:
        idle(copy)
    for _ in range(10):
        beats.clock.advance(60)
        random.shuffle(copies)
        for _ in range(3):
            for copy in copies:
                copy.step()
    assert len(set(beats.sent())) == len(beats.sent()) == 200


@pytest.mark.req("C7", "D16")
def test_the_version_that_started_last_owns_the_entries(beats: Beats, caplog: pytest.LogCaptureFixture) -> None:
    """C57. An entry that left the settings went on firing; here it is retired, and comes back without what it missed."""
    old = beats.beat({"both": {**MINUTELY, "args": ("old",)}, "gone": MINUTELY})
    idle(old)
    beats.pass_by(60, old)
    new = beats.beat({"both": {**MINUTELY, "args": ("new",)}, "added": MINUTELY})
    idle(new)
    assert beats.entry("gone").retired
    with caplog.at_level(logging.WARNING, "dbqueue.beat"):
        for _ in range(5):
            beats.pass_by(60, old)
            beats.pass_by(0, old)
    lines = [record.getMessage() for record in caplog.records if "another version" in record.getMessage()]
    assert len(lines) == 1
    assert "beat1" in lines[0]
    assert [beats.entry(name).fired for name in ("both", "gone")] == [1, 1]  # the old one fired nothing
    idle(new)
    assert [beats.entry(name).fired for name in ("both", "gone", "added")] == [2, 1, 1]
    assert beats.args()[-1] in ([], ["new"])
    again = beats.beat({"both": {**MINUTELY, "args": ("old",)}, "gone": MINUTELY})  # the deployment is taken back
    idle(again)
    assert not beats.entry("gone").retired
    assert beats.entry("gone").fired == 1  # nothing is made up for
    beats.pass_by(60, again)
    assert [beats.entry(name).fired for name in ("both", "gone", "added")] == [3, 2, 1]
    assert beats.entry("added").retired


@pytest.mark.req("C7", "A4", "D16")
@pytest.mark.parametrize("seed", range(3))
def test_a_rolling_deployment_over_many_slots(beats: Beats, seed: int) -> None:
    """C46. A deployment in the very minute: the old scheduler was gone and the new one too late. Beats of two versions start and stop in
    any order; each slot of what both have is sent once."""
    dice = random.Random(seed)
    options = {"dbqueue_catch_up": "all"}
    versions = [
        {
            "both": {**MINUTELY, "options": options},
            f"only{n}": MINUTELY,
            "changing": {**MINUTELY, "args": (n,), "options": options},
        }
        for n in range(2)
    ]
    up = [beats.beat(versions[0])]
    idle(up[0])
    first = to_instant(beats.entry("both").last_slot)
    for minute in range(1, 31):
        if dice.random() < 0.3:
            up.append(beats.beat(versions[dice.random() < 0.7]))
        if len(up) > 1 and dice.random() < 0.2:
            up.pop(0)
        beats.clock.advance(60)
        for beat in dice.sample(up, len(up)):
            beat.step()
            if dice.random() < 0.5:
                beat.step()
        if minute == 30:
            last = beats.beat(versions[1])
            idle(last)
    sent = beats.sent()
    assert len(set(sent)) == len(sent)
    for name in ("both", "changing"):
        assert {slot_id(name, first + n * 60 * SECOND) for n in range(1, 31)} <= set(sent)
        assert beats.entry(name).fired == 30


@pytest.mark.req("C7")
def test_what_is_paused_by_hand_stays_so(beats: Beats) -> None:
    beat = beats.beat({"minutely": MINUTELY})
    idle(beat)
    beats.queue.pause_schedule("minutely", "shop")
    beats.pass_by(60, beat)
    newer = beats.beat({"minutely": {**MINUTELY, "args": (1,)}, "other": EVERY})
    idle(newer)
    beats.pass_by(120, newer)
    assert beats.entry("minutely").paused
    assert beats.entry("minutely").fired == 0
    beats.queue.resume_schedule("minutely", "shop")
    idle(newer)
    assert beats.entry("minutely").fired == 0  # what was paused is not made up for
    beats.pass_by(60, newer)
    assert beats.entry("minutely").fired == 1


@pytest.mark.req("C7")
def test_a_schedule_that_changes_begins_anew(beats: Beats) -> None:
    idle(beats.beat({"e": {"task": TASK, "schedule": crontab(minute="*/2")}}))
    beats.clock.advance(3600)  # nobody was there
    newer = beats.beat({"e": {"task": TASK, "schedule": crontab(minute="*/3")}})
    idle(newer)
    assert beats.entry("e").fired == 0
    beats.pass_by(180, newer)
    assert beats.entry("e").fired == 1


@pytest.mark.req("C7")
def test_rows_that_nobody_declared_are_left(beats: Beats) -> None:
    """Somebody wrote one by hand: no code can make its message."""
    beat = beats.beat({"minutely": MINUTELY})
    idle(beat)
    beats.queue.database.run(
        lambda s: s.execute(
            beats.queue.database.dialect.portable(
                "INSERT INTO {schedules} (owner, name, spec, timezone, catch_up, digest, anchor, last_slot, created_at, updated_at) "
                "VALUES ('shop', 'stranger', '* * * * *', 'UTC', 'all', '', 0, 0, 0, 0)"
            )
        )
    )
    beats.pass_by(60, beat)
    assert beats.entry("minutely").fired == 1
    assert "no such entry" in (beats.entry("stranger").error or "")


@pytest.mark.req("C7")
def test_own_schedules_are_fired_beside_the_entries(beats: Beats) -> None:
    beats.queue.schedule("own", "* * * * *", "raw", {"a": 1})
    beat = beats.beat({"minutely": MINUTELY})
    idle(beat)
    beats.pass_by(60, beat)
    assert beats.entry("minutely").fired == beats.entry("own", "").fired == 1


@pytest.mark.req("C7")
def test_two_apps_share_a_database(beats: Beats) -> None:
    one, two = (
        beats.beat(beats.app({"e": MINUTELY}, "one")),
        beats.beat(beats.app({"e": MINUTELY}, dbqueue_beat_owner="two")),
    )
    for beat in (one, two):
        idle(beat)
    beats.pass_by(60, one, two)
    assert beats.entry("e", "one").fired == beats.entry("e", "two").fired == 1
    assert len(set(beats.sent())) == 2


def test_copies_of_a_version_write_nothing_at_their_start(beats: Beats) -> None:
    """Else ten pods that start would each rewrite ten thousand rows."""
    entries = {f"e{n}": MINUTELY for n in range(5)}
    idle(beats.beat(entries))
    before = {entry.name: entry.updated_at for entry in beats.queue.schedules()}
    beats.clock.advance(1)
    idle(beats.beat(entries))
    assert {entry.name: entry.updated_at for entry in beats.queue.schedules()} == before


@pytest.mark.req("C7")
def test_who_owns_the_entries_stays_so_while_they_are_fired(beats: Beats) -> None:
    """A beat of the new version waits for the transaction in which one of the old version fires."""
    if beats.queue.database.dialect.name == "sqlite":
        pytest.skip("there is one writer at a time")
    idle(beats.beat({"minutely": MINUTELY}))
    dialect = beats.queue.database.dialect
    with beats.queue.database.transaction() as firing:
        assert owners.owner_of(dialect, firing, "shop") is not None
        with beats.queue.database.session() as other:
            other.begin()
            other.execute("SET LOCAL lock_timeout = '100ms'")
            with pytest.raises(Exception, match="lock timeout"):
                owners.take(dialect, other, "shop", "newer", [])
            other.rollback()


# -- the broker --------------------------------------------------------------------------------------------------------


@pytest.mark.req("C7")
@pytest.mark.parametrize("broker", ["memory://", "redis://h:1/0", "amqp://u:secret@h//", "sqla+sqlite:///x.db"])
def test_another_broker_is_refused(beats: Beats, broker: str) -> None:
    with pytest.raises(ConfigError, match="could not commit together") as caught:
        beats.beat(beats.app({"e": EVERY}, broker=broker))
    assert "secret" not in str(caught.value)


@pytest.mark.req("C7")
def test_another_database_is_refused(beats: Beats, make_database_url: Callable[[], str]) -> None:
    elsewhere = DBQueue(make_database_url())
    elsewhere.migrate()
    try:
        with pytest.raises(ConfigError, match="Start a beat for each"):
            beats.beat(beats.app({"e": EVERY}, broker=f"dbqueue+{elsewhere.settings.url}"))
    finally:
        elsewhere.close()


@pytest.mark.parametrize("name", [None, "__main__"])
def test_an_app_without_a_name_is_refused(beats: Beats, name: Any) -> None:
    app = beats.app({"e": EVERY}, name)
    with pytest.raises(ConfigError, match="dbqueue_beat_owner"):
        source_of(app)
    app.conf.dbqueue_beat_owner = "given"
    assert source_of(app).owner == "given"


@pytest.mark.req("C7")
def test_an_outage_costs_no_slot(beats: Beats, postgres: Any) -> None:
    """Sessions of beat and broker are cut in the middle of its work."""
    beat = beats.beat({"minutely": MINUTELY})
    idle(beat)
    beats.pass_by(60, beat)
    assert beats.entry("minutely").fired == 1
    postgres.terminate_connections(beats.queue.database.url.database)
    beats.clock.advance(60)
    deadline = time.monotonic() + 30
    while beats.entry("minutely").fired < 2:
        assert time.monotonic() < deadline
        time.sleep(min(beat.step(), 0.05))
    assert len(set(beats.sent())) == 2


# -- Celery's own hands ------------------------------------------------------------------------------------------------


@pytest.mark.req("C7")
def test_who_wraps_apply_entry_is_called(beats: Beats, monkeypatch: pytest.MonkeyPatch) -> None:
    """As monitoring does, which adds headers there."""
    original, seen = CelerysScheduler.apply_entry, []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        scheduler, entry = args
        seen.append((scheduler.app.main, entry.name))
        entry.options["headers"] = {**entry.options.pop("headers", {}), "monitor": entry.name}
        return original(*args, **kwargs)

    monkeypatch.setattr(CelerysScheduler, "apply_entry", wrapped)
    beat = beats.beat({"minutely": MINUTELY})
    idle(beat)
    beats.pass_by(60, beat)
    assert seen == [("shop", "minutely")]
    with kombu.Connection(beats.broker_url) as connection:
        assert _messages(connection, 1)[0].headers["monitor"] == "minutely"


@pytest.mark.req("C7")
def test_running_an_entry_by_hand(beats: Beats) -> None:
    app = beats.app({"minutely": {**MINUTELY, "args": (1,)}, "bad": {**EVERY, "args": (object(),)}})
    idle(beats.beat(app))
    ids = {source_of(app).run_now("minutely") for _ in range(2)}
    assert len(ids) == 2
    assert set(beats.sent()) == ids
    assert beats.args() == [[1], [1]]
    assert beats.entry("minutely").fired == 0
    with pytest.raises(ScheduleNotFound):
        source_of(app).run_now("other")
    with pytest.raises(NotSupported, match="bad"):
        source_of(app).run_now("bad")


@pytest.mark.req("C7")
def test_entries_are_seen_and_paused_by_command(beats: Beats, cli: Run) -> None:
    idle(beats.beat({"minutely": MINUTELY}))
    url = ("--url", beats.queue.settings.url)
    assert cli("schedules", "pause", "minutely", "--owner", "shop", *url).code == 0
    listed = {entry["name"]: entry for entry in cli("schedules", "list", "--json", *url).json["schedules"]}
    assert (listed["minutely"]["owner"], listed["minutely"]["state"], listed["minutely"]["spec"]) == (
        "shop",
        "paused",
        "* * * * *",
    )
    assert cli("schedules", "resume", "minutely", "--owner", "shop", *url).code == 0
    idle(beats.beats[0])
    assert len(cli("schedules", "next", "minutely", "--owner", "shop", "--json", *url).json["next"]) == 1


def test_a_lazy_scheduler_touches_nothing(tmp_path: Any) -> None:
    """Celery makes one for its banner."""
    app = Celery("shop", broker=f"dbqueue+sqlite:///{tmp_path / 'none.db'}", set_as_current=False)
    scheduler = Scheduler(app, lazy=True)
    assert "none.db" in scheduler.info
    assert scheduler.tick() == scheduler.max_interval == 1.0
    scheduler.close()
    assert os.listdir(tmp_path) == []
    assert "none" in Scheduler(Celery("shop", broker="memory://", set_as_current=False), lazy=True).info
    assert Scheduler(app, lazy=True, max_interval=5).max_interval == 5
    app.close()


@pytest.mark.req("C7")
def test_whatever_is_declared_and_sent_beside_the_message(beats: Beats) -> None:
    """Queues and exchanges of any kind, events, a reply's queue: on SQLite the beat's own transaction has the one write lock, and what
    cannot wait for it is written in it."""
    app = beats.app(
        {f"e{n}": {**EVERY, "options": {"queue": queue}} for n, queue in enumerate(("plain", "brief", "loose"))},
        task_send_sent_event=True,
        result_backend="rpc://",
        task_queues=[
            kombu.Queue("plain"),
            kombu.Queue("brief", auto_delete=True, durable=False),
            kombu.Queue("loose", kombu.Exchange("loose", "topic", durable=False), "loose"),
        ],
    )
    beat = beats.beat(app)
    idle(beat)
    for _ in range(3):
        began = time.monotonic()
        beats.pass_by(60, beat)
        assert time.monotonic() - began < 5
    assert [(beats.entry(f"e{n}").fired, beats.entry(f"e{n}").error) for n in range(3)] == [(3, None)] * 3
    assert {depth.queue: depth.ready for depth in beats.queue.queues()} == {
        "plain": 3,
        "loose": 3,
    }  # the third goes with its consumer


@pytest.mark.req("C7")
def test_an_entry_whose_code_speaks_to_a_database_that_is_down(beats: Beats) -> None:
    """It is no trouble of the beat's own database."""
    away = DBQueue("postgresql://nobody@127.0.0.1:1/none?connect_timeout=2")
    app = beats.app({"good": EVERY, "bad": {"task": "shop.bad", "schedule": 60}})

    class Bad(Task):
        name = "shop.bad"

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            away.database.read(lambda session: session.execute("SELECT 1"))

    app.register_task(Bad())
    beat = beats.beat(app)
    idle(beat)
    beats.pass_by(60, beat)
    assert (beats.entry("good").fired, beats.entry("bad").fired) == (1, 0)
    assert (beats.entry("bad").error or "").startswith("ConnectionLost")
    away.close()


@pytest.mark.req("C7")
def test_an_entry_that_sends_two_messages_sends_both_or_none(beats: Beats) -> None:
    """A task of one's own may publish more than one."""
    app = beats.app({"good": EVERY, "pair": {"task": "shop.pair", "schedule": 60}})
    broken = [True]

    class Pair(Task):
        name = "shop.pair"

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            result = super().apply_async(*args, **kwargs)
            if broken[0]:
                raise RuntimeError
            super().apply_async()
            return result

    app.register_task(Pair())
    beat = beats.beat(app)
    idle(beat)
    beats.pass_by(60, beat)
    assert (len(beats.sent()), len(beats.sent("shop.pair"))) == (1, 0)
    broken.clear()
    broken.append(False)
    beats.pass_by(61, beat)
    assert (len(beats.sent()), len(beats.sent("shop.pair"))) == (2, 2)


@pytest.mark.req("C7", "D16")
def test_a_signal_in_the_middle_of_a_round(beats: Beats) -> None:
    """Celery's handler closes the scheduler and raises SystemExit, wherever the program is. What was not committed then is sent by the
    next beat."""

    def handler() -> None:
        running[0].close()
        raise SystemExit

    running: list[Scheduler] = []
    beats.clock.offset = 0  # this one has the database's own clock
    app = beats.app({"odd": {"task": TASK, "schedule": 0.1, "args": (BeatLazyFunc(handler),)}})
    running.append(Scheduler(app))

    def loop() -> None:
        for _ in range(100):
            time.sleep(min(running[0].tick(), 0.05))

    with pytest.raises(SystemExit):
        loop()
    assert running[0]._beat is not None
    running[0].close()
    running[0].close()
    assert beats.sent() == []
    following = Scheduler(beats.app({"odd": {"task": TASK, "schedule": 0.1, "args": (1,)}}))
    deadline = time.monotonic() + 30
    while not beats.sent():
        assert time.monotonic() < deadline
        time.sleep(min(following.tick(), 0.05))
    following.close()


@pytest.mark.req("C7")
def test_a_beat_of_ours_says_that_it_begins(beats: Beats) -> None:
    """To whoever listens to Celery's signal; and of each slot when it was due, also where a schedule was asked."""
    heard: list[str] = []

    def hear(sender: Any, **kwargs: Any) -> None:
        heard.append(sender.owner)

    slots: list[events.ScheduleFired] = []
    signals.beat_init.connect(hear, weak=False, dispatch_uid="test")
    unsubscribe = events.subscribe(
        lambda event: slots.append(event) if isinstance(event, events.ScheduleFired) else None
    )
    try:
        beat = beats.beat({"asked": {"task": TASK, "schedule": 30.5}, "minutely": MINUTELY})
        idle(beat)
        beats.pass_by(60, beat)
        due = {event.name: event.slot for event in slots}
        assert due["minutely"] == beats.entry("minutely").last_slot
        assert 25 < (beats.entry("asked").last_slot - due["asked"]).total_seconds() < 31
    finally:
        unsubscribe()
        signals.beat_init.disconnect(dispatch_uid="test")
    assert heard == ["shop"]
