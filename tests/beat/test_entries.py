"""The entries of an app as schedules, against what Celery itself says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import PersistentScheduler, ScheduleEntry
from celery.schedules import crontab, schedule, solar
from hypothesis import given, settings
from hypothesis import strategies as st

from dbqueue.celery_beat import entries
from dbqueue.celery_beat.entries import AppEntry
from dbqueue.celery_beat.scheduler import Scheduler
from dbqueue.clock import SECOND, to_datetime, to_instant
from dbqueue.errors import ConfigError, InvalidArgument, QueueError
from dbqueue.schedules import Entry
from tests.transport.shops import ROOT, need_package

HOUR = 3_600 * SECOND
AT = st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1))  # noqa: DTZ001 - what hypothesis makes has no zone
ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
    "America/Sao_Paulo",
    "Africa/Casablanca",
)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    yield app
    app.close()


def read(app: Celery, **given: Any) -> dict[str, AppEntry]:
    """The entries of an app whose ``beat_schedule`` is this."""
    app.conf.beat_schedule = {name: {"task": "t", **entry} for name, entry in given.items()}
    return entries.read(app, "shop", Scheduler(app, lazy=True).read_entries())


def one(app: Celery, when: Any, **more: Any) -> AppEntry:
    return read(app, one={"schedule": when, **more})["one"]


def row(entry: AppEntry, last_slot: int) -> Entry:
    """As the table has it when the cursor is there."""
    blank = dict.fromkeys(Entry.__struct_fields__)
    stored = {name: getattr(entry.definition, name) for name in entry.definition.__struct_fields__}
    return Entry(
        **{
            **blank,
            **stored,
            "digest": "",
            "paused": False,
            "retired": False,
            "anchor": last_slot,
            "last_slot": last_slot,
        }
    )


# -- crontab -----------------------------------------------------------------------------------------------------------


def _field(low: int, high: int) -> st.SearchStrategy[Any]:
    return st.just("*") | st.sets(st.integers(low, high), min_size=1, max_size=6)


@settings(max_examples=400, deadline=None)
@given(
    zone=st.sampled_from(ZONES), minute=_field(0, 59), hour=_field(0, 23), day=st.just("*") | st.sets(st.integers(1, 28), min_size=1),
    month=_field(1, 12), weekday=_field(0, 6), at=AT,
)  # fmt: skip
@pytest.mark.req("C7", "D15")
def test_a_crontab_is_due_when_celery_says_so(
    zone: str, minute: Any, hour: Any, day: Any, month: Any, weekday: Any, at: datetime
) -> None:
    """C122. Day of month and weekday must both match, as in Celery. The only difference: on a wall clock that jumps."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.timezone = zone
    try:
        given = crontab(minute=minute, hour=hour, day_of_month=day, month_of_year=month, day_of_week=weekday)
        entry = one(app, given)
        tz = ZoneInfo(zone)
        last = at.replace(tzinfo=timezone.utc).astimezone(tz)
        given.nowfun = lambda: last
        theirs = (last.astimezone(timezone.utc) + given.remaining_estimate(last)).replace(microsecond=0)
        assert entry.spec is not None
        slot = entry.spec.next_after(to_instant(last))
        assert slot is not None
        ours = to_datetime(slot)
        assert _steady(tz, last, max(ours, theirs)) is False or ours == theirs
        wall = ours.astimezone(tz)
        if _steady(tz, ours - timedelta(hours=2), ours + timedelta(hours=2)):
            assert wall.minute in given.minute
            assert wall.hour in given.hour
            assert wall.day in given.day_of_month
            assert wall.isoweekday() % 7 in given.day_of_week
            assert wall.month in given.month_of_year
    finally:
        app.close()


def _steady(tz: ZoneInfo, first: datetime, last: datetime) -> bool:
    """Whether the zone's clocks do not jump in between."""
    at, offset = first.astimezone(timezone.utc), first.astimezone(tz).utcoffset()
    while at < last:
        at = min(at + timedelta(hours=6), last.astimezone(timezone.utc))
        if at.astimezone(tz).utcoffset() != offset:
            return False
    return True


@pytest.mark.req("C7", "D15")
@pytest.mark.parametrize(
    ("hour", "minute", "after", "slots"),
    [
        # 28 March 2027, 2:00 becomes 3:00
        (2, 30, "2027-03-27T12:00", ["2027-03-28T01:00", "2027-03-29T00:30"]),
        # 31 October 2027, 3:00 becomes 2:00
        (2, 30, "2027-10-30T12:00", ["2027-10-31T00:30", "2027-11-01T01:30"]),
    ],
)
def test_where_the_clocks_jump(app: Celery, hour: int, minute: int, after: str, slots: list[str]) -> None:
    """C126. A time that is skipped is due at the first instant after it, one that is repeated the first time only."""
    app.conf.timezone = "Europe/Berlin"
    spec = one(app, crontab(hour=hour, minute=minute)).spec
    assert spec is not None
    at, found = to_instant(datetime.fromisoformat(after + "+00:00")), []
    for _ in slots:
        at = spec.next_after(at) or 0
        found.append(to_datetime(at).strftime("%Y-%m-%dT%H:%M"))
    assert found == slots


def test_friday_the_thirteenth(app: Celery) -> None:
    """Celery's rule is and, that of a spec of ours is or."""
    entry = one(app, crontab(hour=0, minute=0, day_of_month=13, day_of_week=5))
    assert (entry.definition.spec, entry.definition.timezone) == ("0 0 13 * 5 both", "UTC")
    assert entry.spec is not None
    slot = entry.spec.next_after(to_instant(datetime(2026, 11, 30, tzinfo=timezone.utc)))
    assert to_datetime(slot or 0) == datetime(2027, 8, 13, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("conf", "zone"),
    [
        ({}, "UTC"),
        ({"timezone": "Asia/Tokyo"}, "Asia/Tokyo"),
        ({"timezone": "Asia/Tokyo", "enable_utc": False}, "Asia/Tokyo"),
        ({"timezone": ZoneInfo("Asia/Tokyo")}, "Asia/Tokyo"),
    ],
)
def test_the_zone_is_the_apps(app: Celery, conf: dict[str, Any], zone: str) -> None:
    app.conf.update(conf)
    entry = one(app, crontab(hour=8))
    assert entry.definition.timezone == zone
    assert entry.spec is not None


def test_the_zone_of_a_nowfun_is_what_the_installed_celery_makes_of_it(app: Celery) -> None:
    """Before 5.7 the fields were matched in the zone of what nowfun returns; since then in the app's."""
    tokyo = ZoneInfo("Asia/Tokyo")
    given = crontab(hour=8, minute=0, nowfun=lambda: datetime(2026, 11, 30, 12, tzinfo=tokyo))
    entry = one(app, given)
    assert entry.spec is not None
    slot = to_datetime(entry.spec.next_after(to_instant(given.now())) or 0)
    assert slot == (given.now() + given.remaining_estimate(given.now())).astimezone(timezone.utc)


def test_a_zone_without_a_name_is_asked(app: Celery) -> None:
    """The machine's own zone, say: its rules are Celery's affair."""
    app.conf.update(enable_utc=False, timezone=timezone(timedelta(hours=3)))
    entry = one(app, crontab(hour=8, minute=0))
    assert entry.spec is None
    before, after = (to_instant(datetime(2026, 11, 30, 4, 59, tzinfo=timezone.utc)) + n * 120 * SECOND for n in (0, 1))
    assert entry.round(row(entry, before - HOUR), before).slots == []
    assert entry.round(row(entry, before - HOUR), after).slots == [before - HOUR]


# -- intervals, and what is asked --------------------------------------------------------------------------------------


@pytest.mark.req("C7")
@pytest.mark.parametrize(
    ("when", "spec", "counted"),
    [
        (30, "@every 30s", True),
        (timedelta(days=2), "@every 2d", True),
        (schedule(90), "@every 90s", True),
        (0.5, "@every 0.5s", False),
        (timedelta(days=400), "@every 3.456e+07s", False),
    ],
)
def test_intervals(app: Celery, when: Any, spec: str, counted: bool) -> None:
    entry = one(app, when)
    assert (entry.definition.spec, entry.spec is not None) == (spec, counted)


@pytest.mark.req("C7")
@settings(max_examples=150, deadline=None)
@given(
    every=st.sampled_from([0.25, 7.5, 60, 5_400, 3_600, 86_400, 40_000_000]), relative=st.booleans(), zone=st.sampled_from(ZONES),
    at=AT, late=st.integers(0, 3 * 10**12),
)  # fmt: skip
def test_what_is_asked_is_due_when_celery_says_so(
    every: float, relative: bool, zone: str, at: datetime, late: int
) -> None:
    """Fractions of a second, more than a year, ``relative``: with the database's clock, whatever the machine's says."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.timezone = zone
    try:
        if not relative and every in (60, 5_400, 3_600, 86_400):
            every += 0.125
        entry = one(app, timedelta(seconds=every), relative=relative)
        assert entry.spec is None
        last = to_instant(at.replace(tzinfo=timezone.utc))
        now = last + 1 + late
        oracle = schedule(
            timedelta(seconds=every), relative, app=app, nowfun=lambda: to_datetime(now).astimezone(app.timezone)
        )
        due, pause = oracle.is_due(to_datetime(last).astimezone(app.timezone))
        found = entry.round(row(entry, last), now)
        assert found.slots == ([last] if due else [])
        assert found.last_slot == (now if due else last)
        assert found.next_at == now + round(min(max(pause, 0.001), 300) * SECOND)
    finally:
        app.close()


def test_solar(app: Celery) -> None:
    need_package("ephem")
    entry = one(app, solar("sunrise", 52.5, 13.4))
    last = to_instant(datetime(2026, 6, 1, 12, tzinfo=timezone.utc))
    assert entry.round(row(entry, last), last + 12 * HOUR).slots == []
    assert entry.round(row(entry, last), last + 16 * HOUR).slots == [last]  # the sun rose at 2:48


class Moody(schedule):
    """Due when a list says so; it reads no clock."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(1)
        self.answers = answers

    def is_due(self, last_run_at: datetime) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_schedule_of_ones_own(app: Celery) -> None:
    entry = one(app, Moody([(False, 5), (True, None), (True, 1e9), (False, "soon")]))
    assert entry.definition.spec.startswith("@Moody ")
    asked = [entry.round(row(entry, HOUR), 2 * HOUR) for _ in range(4)]
    assert [found.slots for found in asked] == [[], [HOUR], [HOUR], []]
    assert [(found.next_at or 0) - 2 * HOUR for found in asked] == [
        5 * SECOND,
        300 * SECOND,
        300 * SECOND,
        300 * SECOND,
    ]


def test_nobody_is_asked_while_the_cursor_lies_in_the_future(app: Celery) -> None:
    entry = one(app, Moody([]))
    assert entry.round(row(entry, 2 * HOUR), HOUR)[:2] == ([], 2 * HOUR)


def test_the_longest_pause_is_the_apps(app: Celery) -> None:
    app.conf.beat_max_loop_interval = 7
    entry = one(app, Moody([(False, 100)]))
    assert entry.round(row(entry, HOUR), 2 * HOUR).next_at == 2 * HOUR + 7 * SECOND


# -- what is read of an app --------------------------------------------------------------------------------------------


@pytest.mark.req("C7")
@pytest.mark.parametrize("expires", [3600, None])
@pytest.mark.parametrize("backend", ["", "rpc://", "cache+memory://", "file:///tmp"])
def test_celery_adds_what_its_own_scheduler_adds(app: Celery, tmp_path: Path, backend: str, expires: Any) -> None:
    app.conf.update(result_backend=backend, result_expires=expires)
    theirs = PersistentScheduler(app, schedule_filename=str(tmp_path / "schedule"))
    try:
        assert set(read(app)) == set(theirs.schedule)
    finally:
        theirs.close()


def test_periodic_tasks_of_signals(app: Celery) -> None:
    @app.on_after_configure.connect
    def early(sender: Celery, **kwargs: Any) -> None:
        sender.add_periodic_task(10, note.s("a"), name="early")

    @app.on_after_finalize.connect
    def late(sender: Celery, **kwargs: Any) -> None:
        sender.add_periodic_task(20, note.s("b"))
        sender.add_periodic_task(20, note.s("b" * 5_000))

    @app.task(name="note", shared=False)
    def note(text: str) -> None: ...

    app.finalize()
    app.conf.beat_schedule  # noqa: B018 - the configuration is loaded by the first look
    found = entries.read(app, "shop", Scheduler(app, lazy=True).read_entries())
    assert {name for name in found if len(name) < 50} >= {"early", "note('b')"}
    long = [name for name in found if len(name) > 100]
    assert len(long) == 1
    assert len(long[0]) <= entries.LONGEST_NAME


def test_names_that_celery_made_stay_apart(app: Celery) -> None:
    names = {entries.stored_name("x" * 300 + end) for end in "ab"}
    assert len(names) == 2
    assert names == {entries.stored_name("x" * 300 + end) for end in "ab"}


@pytest.mark.req("C7")
@pytest.mark.parametrize(
    ("conf", "options", "stored"),
    [
        ({}, {}, ("latest", None)),
        ({"dbqueue_beat_catch_up": "skip"}, {}, ("skip", None)),
        ({"dbqueue_beat_catch_up": "skip"}, {"dbqueue_catch_up": "all", "dbqueue_max_age": 60}, ("all", 60 * SECOND)),
        ({"beat_cron_starting_deadline": 90}, {}, ("latest", 90 * SECOND)),
        ({"beat_cron_starting_deadline": 90}, {"dbqueue_max_age": 60}, ("latest", 60 * SECOND)),
        ({"beat_cron_starting_deadline": 0}, {}, ("latest", SECOND)),
    ],
)
def test_what_becomes_of_missed_slots(
    app: Celery, conf: dict[str, Any], options: dict[str, Any], stored: tuple[str, Any]
) -> None:
    app.conf.update(conf)
    entry = one(app, crontab(), options=options | {"queue": "other"})
    assert (entry.definition.catch_up, entry.definition.max_age) == stored
    assert entry.options == {"queue": "other"}
    assert one(app, 60).definition.max_age is None  # a deadline is for crontabs


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ({"schedule": crontab(), "options": {"dbqueue_catch_up": "some"}}, InvalidArgument, "'odd'.*all, latest, skip"),
        ({"schedule": crontab(), "options": {"dbqueue_max_age": 0}}, InvalidArgument, "'odd'.*max_age"),
        ({"schedule": 0.5, "options": {"dbqueue_catch_up": "all"}}, ConfigError, "'odd'.*cannot be told"),
        ({"schedule": 0.5, "options": {"dbqueue_max_age": 60}}, ConfigError, "'odd'.*cannot be told"),
        ({"schedule": crontab(minute=[])}, ConfigError, "'odd'.*names no number"),
        ({"schedule": None}, ConfigError, "'odd'"),
        ({"schedule": 5, "shedule": 5}, ConfigError, "'odd'.*shedule"),
    ],
)
def test_what_is_refused_at_the_start(app: Celery, entry: dict[str, Any], error: type[QueueError], words: str) -> None:
    with pytest.raises(error, match=words):
        read(app, odd=entry)


_DIGEST = """
import sys
from datetime import datetime, timedelta
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab
from dbqueue import owners
from dbqueue.celery_beat import entries
from dbqueue.celery_beat.scheduler import Scheduler
class Odd: pass
app = Celery("shop", broker="memory://")
app.conf.beat_schedule = {
    "a": {"task": "t", "schedule": crontab(minute={5, 9, 1}), "args": ({"x", "y", "z"}, BeatLazyFunc(datetime.now), Odd())},
    "b": {"task": "t", "schedule": 5, "kwargs": {"at": timedelta(1), "f": len}, "options": {"headers": {"a": 1, "b": 2}}},
}
found = entries.read(app, "shop", Scheduler(app, lazy=True).read_entries())
print(owners.digest_of([entry.definition for entry in found.values()]))
"""


@pytest.mark.req("C7")
def test_the_same_code_has_the_same_digest_in_every_process() -> None:
    """Or copies of one version would take the app from each other for ever."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in (1, 2, 3)
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"task": "u"}, {"schedule": 31}, {"schedule": crontab()}, {"args": (2,)}, {"kwargs": {"a": 1}}, {"options": {"queue": "r"}},
        {"options": {"dbqueue_catch_up": "all"}},
    ],
)  # fmt: skip
def test_another_definition_has_another_digest(app: Celery, other: dict[str, Any]) -> None:
    first = one(app, 30, args=(1,)).definition.digest
    assert read(app, one={"schedule": 30, "args": (1,), **other})["one"].definition.digest != first
    assert one(app, 30, args=(1,)).definition.digest == first


def test_an_entry_may_be_one_of_celerys_objects(app: Celery) -> None:
    app.conf.beat_schedule = {"one": ScheduleEntry(task="t", schedule=schedule(30), args=(1,), app=app)}
    assert entries.read(app, "shop", Scheduler(app, lazy=True).read_entries())["one"].definition.spec == "@every 30s"
