"""When schedules are due: the strict grammar, and slots against calendars that are walked minute by minute."""

from __future__ import annotations

import pickle
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import FrozenInstanceError, dataclass, fields
from datetime import date, datetime, timedelta, timezone
from functools import cache, lru_cache
from itertools import pairwise
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import dbqueue
from dbqueue import InvalidSpec, cron
from dbqueue.clock import SECOND, to_datetime, to_instant
from dbqueue.cron import FIELDS, Cron, Every, parse

pytestmark = pytest.mark.req("D15")

MINUTE = 60 * SECOND
DAY = 86_400 * SECOND
ALL = 10**9

many = settings(
    max_examples=500,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def at(when: str) -> int:
    """``2026-01-01T00:00`` in UTC, or just a date."""
    return to_instant(datetime.fromisoformat(when).replace(tzinfo=timezone.utc))


def shown(slots: list[int]) -> list[str]:
    return [to_datetime(slot).strftime("%Y-%m-%dT%H:%M") for slot in slots]


def cron_of(spec: str, zone: str = "UTC", *, both: bool = False) -> Cron:
    parsed = parse(spec, zone, both=both)
    assert isinstance(parsed, Cron)
    return parsed


# -- a second reading of specs, which shares nothing with the product ----------------------------------------------------


@dataclass(frozen=True)
class Item:
    text: str
    low: int
    high: int
    step: int = 1

    def names(self, number: int) -> bool:
        return self.low <= number <= self.high and (number - self.low) % self.step == 0


@cache
def numbers_of(items: tuple[Item, ...], index: int) -> frozenset[int]:
    _, low, high, _ = FIELDS[index]
    return frozenset(number for number in range(low, high + 1) if any(item.names(number) for item in items))


@dataclass(frozen=True)
class Written:
    """A spec that hypothesis wrote, and what it means."""

    fields: tuple[tuple[Item, ...], ...]
    both: bool

    @property
    def text(self) -> str:
        return " ".join(",".join(item.text for item in items) for items in self.fields)

    def numbers(self, index: int) -> frozenset[int]:
        return numbers_of(self.fields[index], index)

    def restricted(self, index: int) -> bool:
        return len(self.numbers(index)) < FIELDS[index].high - FIELDS[index].low + 1

    @property
    def comes(self) -> bool:
        """Whether there is any date at all. The longest February has 29 days."""
        if self.restricted(2) and self.restricted(4) and not self.both:
            return True
        lengths = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
        return min(self.numbers(2)) <= max(lengths[month - 1] for month in self.numbers(3))

    def due_on(self, days: Iterable[date]) -> list[date]:
        numbers, weekdays, months = self.numbers(2), self.numbers(4), self.numbers(3)
        either = self.restricted(2) and self.restricted(4) and not self.both
        matches = any if either else all
        return [
            day
            for day in days
            if day.month in months and matches((day.day in numbers, day.isoweekday() % 7 in weekdays))
        ]


def items(index: int, random: Random) -> tuple[Item, ...]:
    _, low, high, _ = FIELDS[index]
    written = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        first, last = sorted((random.randint(low, high), random.randint(low, high)))
        step = random.randint(1, high - low)
        zero = random.choice(("", "", "0")) if first < 10 else ""
        written.append(
            random.choice(
                (
                    Item(f"{zero}{first}", first, first),
                    Item(f"{zero}{first}", first, first),
                    Item(f"{zero}{first}-{last}", first, last),
                    Item(f"*/{step}", low, high, step),
                    Item(f"{zero}{first}-{last}/{step}", first, last, step),
                )
            )
        )
    return tuple(written)


def pool(index: int) -> list[tuple[Item, ...]]:
    """Three hundred ways to write a field; a certain share of them, which differs from field to field, is a star."""
    random = Random(index)
    _, low, high, _ = FIELDS[index]
    stars = (60, 90, 180, 210, 180)[index]
    return [(Item("*", low, high),)] * stars + [items(index, random) for _ in range(300 - stars)]


# One choice for a field, instead of one for each character: some thousand specs in a few seconds.
written = st.builds(Written, st.tuples(*(st.sampled_from(pool(index)) for index in range(5))), st.booleans())
specs = written.filter(lambda one: one.comes)


# -- known answers -------------------------------------------------------------------------------------------------------

KNOWN: list[tuple[str, str, str, list[str]]] = [
    # every part of the grammar
    ("* * * * *", "UTC", "2026-01-01T00:00", ["2026-01-01T00:01", "2026-01-01T00:02"]),
    ("* * * * *", "UTC", "2026-12-31T23:59", ["2027-01-01T00:00"]),
    ("*/15 * * * *", "UTC", "2026-01-01T00:00", ["2026-01-01T00:15", "2026-01-01T00:30", "2026-01-01T00:45", "2026-01-01T01:00"]),
    ("*/40 * * * *", "UTC", "2026-01-01T00:00", ["2026-01-01T00:40", "2026-01-01T01:00", "2026-01-01T01:40"]),
    ("5-59/15 * * * *", "UTC", "2026-01-01T00:00", ["2026-01-01T00:05", "2026-01-01T00:20", "2026-01-01T00:35", "2026-01-01T00:50"]),
    ("10-12,50 6 * * *", "UTC", "2026-01-01", ["2026-01-01T06:10", "2026-01-01T06:11", "2026-01-01T06:12", "2026-01-01T06:50"]),
    ("0 */10 * * *", "UTC", "2026-01-01", ["2026-01-01T10:00", "2026-01-01T20:00", "2026-01-02T00:00"]),
    ("30 9-17/4 * * 1-5", "UTC", "2026-01-02", ["2026-01-02T09:30", "2026-01-02T13:30", "2026-01-02T17:30", "2026-01-05T09:30"]),
    ("0 6 * * 1", "UTC", "2026-01-01", ["2026-01-05T06:00", "2026-01-12T06:00", "2026-01-19T06:00"]),
    ("0 8 * * 0", "UTC", "2026-01-01", ["2026-01-04T08:00", "2026-01-11T08:00"]),
    ("0 8 * * 0,6", "UTC", "2026-01-01", ["2026-01-03T08:00", "2026-01-04T08:00", "2026-01-10T08:00", "2026-01-11T08:00"]),
    ("0 0 1 */5 *", "UTC", "2026-01-01", ["2026-06-01T00:00", "2026-11-01T00:00", "2027-01-01T00:00"]),
    ("0 0 1 1-3 *", "UTC", "2026-01-01", ["2026-02-01T00:00", "2026-03-01T00:00", "2027-01-01T00:00"]),
    # months without the day, leap years, the year that is none
    ("0 0 31 * *", "UTC", "2026-01-01", [f"2026-{m}-31T00:00" for m in ("01", "03", "05", "07", "08", "10", "12")]),
    ("0 0 1 2 *", "UTC", "2026-07-11T10:00", ["2027-02-01T00:00"]),
    ("0 0 29 2 *", "UTC", "2026-01-01", ["2028-02-29T00:00", "2032-02-29T00:00"]),
    ("0 0 29 2 *", "UTC", "2096-02-28", ["2096-02-29T00:00", "2104-02-29T00:00"]),
    ("0 0 28 2 *", "UTC", "2100-02-01", ["2100-02-28T00:00", "2101-02-28T00:00"]),
    ("0 0 30,31 2,4 *", "UTC", "2026-01-01", ["2026-04-30T00:00", "2027-04-30T00:00"]),
    # day and weekday: either where both are restricted; a step restricts, a full range does not
    ("0 0 13 * 5", "UTC", "2026-01-01", ["2026-01-02T00:00", "2026-01-09T00:00", "2026-01-13T00:00", "2026-01-16T00:00"]),
    ("48 14 31 6 0", "UTC", "2026-01-01", ["2026-06-07T14:48", "2026-06-14T14:48", "2026-06-21T14:48", "2026-06-28T14:48"]),
    ("0 0 */2 * 1", "UTC", "2026-01-01", ["2026-01-03T00:00", "2026-01-05T00:00", "2026-01-07T00:00", "2026-01-09T00:00"]),
    ("0 0 1-31 * 1", "UTC", "2026-01-01", ["2026-01-05T00:00", "2026-01-12T00:00"]),
    ("0 0 */1 * 1", "UTC", "2026-01-01", ["2026-01-05T00:00", "2026-01-12T00:00"]),
    ("0 0 13 * 0-6", "UTC", "2026-01-01", ["2026-01-13T00:00", "2026-02-13T00:00"]),
    ("0 0 13 * */2", "UTC", "2026-01-10", ["2026-01-11T00:00", "2026-01-13T00:00", "2026-01-15T00:00"]),
    # wall clocks far from UTC
    ("0 12 * * *", "Asia/Kathmandu", "2026-01-01", ["2026-01-01T06:15", "2026-01-02T06:15"]),
    ("0 0 1 * *", "Asia/Kathmandu", "2026-01-01", ["2026-01-31T18:15", "2026-02-28T18:15"]),
    ("0 8 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T06:00", "2026-03-30T06:00"]),
    ("0 8 * * 0", "Europe/Berlin", "2026-10-24T12:00", ["2026-10-25T07:00", "2026-11-01T07:00"]),
    ("0 0 1 1 *", "Pacific/Kiritimati", "2026-06-01", ["2026-12-31T10:00"]),
    ("20 * * * *", "UTC", "2026-10-24T22:00", ["2026-10-24T22:20", "2026-10-24T23:20", *(f"2026-10-25T0{h}:20" for h in range(5))]),
    # skipped: at the first instant after the gap, and one slot with what is due there anyway
    ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:30"]),
    ("0 2,3 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:00", "2026-03-30T01:00"]),
    ("*/20 * * * *", "Europe/Berlin", "2026-03-29T00:30", ["2026-03-29T00:40", "2026-03-29T01:00", "2026-03-29T01:20"]),
    ("59 1,2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["2026-03-29T00:59", "2026-03-29T01:00", "2026-03-29T23:59"]),
    ("15 2 * * *", "America/New_York", "2026-03-08T00:00", ["2026-03-08T07:00", "2026-03-09T06:15"]),
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["2026-10-03T15:30", "2026-10-04T15:15"]),
    ("30 0 * * 5", "Africa/Cairo", "2024-04-25T12:00", ["2024-04-25T22:00", "2024-05-02T21:30"]),
    ("30 2 * * *", "Africa/Casablanca", "2024-04-13T12:00", ["2024-04-14T02:00", "2024-04-15T01:30"]),
    ("0 12 30 12 *", "Pacific/Apia", "2011-12-01", ["2011-12-30T10:00", "2012-12-29T22:00"]),
    # repeated: the first time
    ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", ["2026-10-25T00:30", "2026-10-26T01:30"]),
    ("20 * * * *", "Europe/Berlin", "2026-10-24T23:00", ["2026-10-24T23:20", "2026-10-25T00:20", "2026-10-25T02:20"]),
    ("* * * * *", "Europe/Berlin", "2026-10-25T00:58", ["2026-10-25T00:59", "2026-10-25T02:00", "2026-10-25T02:01"]),
    ("30 1 * * *", "America/New_York", "2026-11-01T00:00", ["2026-11-01T05:30", "2026-11-02T06:30"]),
    ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["2026-04-04T14:45", "2026-04-05T15:15"]),
    ("30 2 * * *", "Africa/Casablanca", "2024-03-09T12:00", ["2024-03-10T01:30", "2024-03-11T02:30"]),
    ("0 0 * * *", "America/St_Johns", "2010-11-06T12:00", ["2010-11-07T02:30", "2010-11-08T03:30"]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "zone", "after", "expected"), KNOWN)
def test_known_slots(spec: str, zone: str, after: str, expected: list[str]) -> None:
    parsed = parse(spec, zone)
    assert shown(parsed.slots(at(after), at("2200-01-01"), len(expected))) == expected
    one_by_one, instant = [], at(after)
    for _ in expected:
        following = parsed.next_after(instant)
        assert following is not None
        one_by_one.append(instant := following)
    assert shown(one_by_one) == expected
    assert parsed.slots(at(after), instant, ALL) == one_by_one
    assert parsed.slots(at(after), instant - 1, ALL) == one_by_one[:-1]
    assert parsed.latest(at(after), instant) == instant
    assert parsed.latest(at(after), instant - 1) == (one_by_one[-2] if len(one_by_one) > 1 else None)


@pytest.mark.parametrize(
    ("spec", "zone", "until", "expected"),
    [
        ("*/15 9-17 * * 1-5", "UTC", "2026-01-05T08:59", "2026-01-02T17:45"),
        ("0 0 29 2 *", "UTC", "2104-02-28T23:59", "2096-02-29T00:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T00:59", "2026-03-28T01:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T01:00", "2026-03-29T01:00"),
        # the second round of the repeated hour: all of the first is past
        ("45 2 * * *", "Europe/Berlin", "2026-10-25T01:15", "2026-10-25T00:45"),
        ("* * * * *", "Europe/Berlin", "2026-10-25T01:59", "2026-10-25T00:59"),
        ("* * * * *", "Europe/Berlin", "2026-10-25T02:00", "2026-10-25T02:00"),
        ("0 0 * * *", "America/St_Johns", "2010-11-07T02:45", "2010-11-07T02:30"),  # it is yesterday again, 23:15
    ],
)
def test_known_latest_slots(spec: str, zone: str, until: str, expected: str) -> None:
    latest = parse(spec, zone).latest(0, at(until))
    assert latest is not None
    assert shown([latest]) == [expected]


@pytest.mark.req("C7")
def test_both_is_celerys_rule_and_changes_nothing_where_one_field_is_free() -> None:
    fridays = parse("0 0 13 * 5", both=True)
    assert shown(fridays.slots(at("2026-01-01"), at("2027-01-01"), ALL)) == [
        "2026-02-13T00:00",
        "2026-03-13T00:00",
        "2026-11-13T00:00",
    ]
    assert shown(parse("0 0 */2 * 1", both=True).slots(at("2026-01-01"), at("2027-01-01"), 4)) == [
        "2026-01-05T00:00",
        "2026-01-19T00:00",
        "2026-02-09T00:00",
        "2026-02-23T00:00",
    ]
    assert fridays != parse("0 0 13 * 5")
    for spec in ("0 0 13 * *", "0 0 * * 5", "* * * * *", "0 0 1-31 * 5", "0 0 13 * 0-6"):
        assert parse(spec, both=True) == parse(spec)


@pytest.mark.req("C7")
def test_sets_that_somebody_else_has_parsed() -> None:
    sets: list[Any] = [{30, 0}, [7, 6, 7], range(1, 32), (1,), {0}]
    assert Cron(*sets) == parse("0,30 6,7 * 1 0")
    assert Cron(*sets[:2], {5}, *sets[3:], "Asia/Tokyo", True) == parse("*/30 6-7 5 1 0", "Asia/Tokyo", both=True)


@pytest.mark.req("C7")
def test_celerys_crontab_and_the_same_text_name_the_same_sets() -> None:
    from celery.schedules import crontab

    celerys = crontab(minute="*/7", hour="3-9/2", day_of_month="1,15-20", month_of_year="*/5", day_of_week="1-5")
    ours = Cron(
        tuple(celerys.minute),
        tuple(celerys.hour),
        tuple(celerys.day_of_month),
        tuple(celerys.month_of_year),
        tuple(celerys.day_of_week),
        both=True,
    )
    assert ours == parse("*/7 3-9/2 1,15-20 */5 1-5", both=True)


# -- the grammar ---------------------------------------------------------------------------------------------------------


@many
@given(written)
def test_a_spec_names_what_its_parts_name(one: Written) -> None:
    if not one.comes:
        with pytest.raises(InvalidSpec, match="never be due"):
            parse(one.text, both=one.both)
        return
    parsed = cron_of(one.text, both=one.both)
    for index, numbers in enumerate((parsed.minutes, parsed.hours, parsed.days, parsed.months, parsed.weekdays)):
        assert list(numbers) == sorted(one.numbers(index))
    again = parse(str(parsed).removesuffix(" both"), both=one.both)
    assert again == parsed
    assert str(again) == str(parsed)


@many
@given(specs, specs, st.sampled_from(("UTC", "Europe/Berlin")), st.sampled_from(("UTC", "Asia/Tokyo")))
def test_the_text_is_the_same_exactly_for_the_same_spec(one: Written, other: Written, here: str, there: str) -> None:
    first, second = parse(one.text, here, both=one.both), parse(other.text, there, both=other.both)
    assert (first == second) is (str(first) == str(second))
    assert hash(first) == hash(parse(one.text, here, both=one.both))


@pytest.mark.req("D16")
@pytest.mark.parametrize(
    ("spec", "zone", "both", "text"),
    [
        ("*/1 0-23 1-31 */1 0,1,2,3,4,5,6", "UTC", True, "* * * * *"),
        ("0,15,30,45 00 01 1-12 *", "UTC", False, "*/15 0 1 * *"),
        ("1-9/2 1,2,3,9 * * 6,0", "UTC", False, "1,3,5,7,9 1-3,9 * * 0,6"),
        ("0 0,1 1,3,5-31/2 */6 *", "UTC", False, "0 0-1 */2 1,7 *"),
        ("5-59/15 2,12,22 * * *", "UTC", False, "5,20,35,50 2,12,22 * * *"),
        ("*/29 */9 */30 */5 */3", "UTC", False, "*/29 */9 1,31 */5 */3"),
        ("0 6 13 * 5", "Europe/Berlin", True, "0 6 13 * 5 both Europe/Berlin"),
        ("0 6 13 * 5", "UTC", True, "0 6 13 * 5 both"),
        ("0 6 * * 5", "America/Argentina/Buenos_Aires", True, "0 6 * * 5 America/Argentina/Buenos_Aires"),
        ("@every 90s", "UTC", False, "@every 90s"),
        ("@every 000120s", "UTC", True, "@every 2m"),
        ("@every 1440m", "UTC", False, "@every 1d"),
    ],
)  # fmt: skip
def test_canonical_texts_stay_as_they_are(spec: str, zone: str, both: bool, text: str) -> None:
    """Stored fingerprints contain them: change none of these lines."""
    assert str(parse(spec, zone, both=both)) == text


REFUSED: list[tuple[object, str]] = [
    (None, r"must be a str such as .*; got NoneType\. Write one"),
    (5, r"got int\."),
    (b"* * * * *", r"got bytes\."),
    ("", r"must have 5 fields: minute, hour, .*; got 0\. Correct"),
    (" ", r"got 0\."),
    ("* * * *", r"got 4\. Correct"),
    ("0 * * * * *", r"got 6\. Seconds and years cannot be given"),
    ("0 0 * * * 2026 *", r"got 7\. Seconds"),
    ("*  * * * *", r"exactly one space"),
    ("*  * * *", r"got 4\."),
    (" * * * * *", r"exactly one space"),
    ("* * * * * ", r"exactly one space"),
    ("* * *\t* *", r"exactly one space"),
    ("* * * * *\n", r"got 5|exactly one space|no value"),
    ("*\u00a0* * * *", r"exactly one space"),
    ("0," * 300 + "0 * * * *", r"at most 500 characters; it has 609\. Write ranges"),
    # outside of the range of the field
    ("60 * * * *", r"field 'minute', '60' is not from 0 to 59\."),
    ("* 24 * * *", r"field 'hour', '24' is not from 0 to 23\."),
    ("0 0 0 * *", r"field 'day of month', '0' is not from 1 to 31\."),
    ("0 0 32 * *", r"field 'day of month', '32' is not from 1 to 31\."),
    ("0 0 1 0 *", r"field 'month', '0' is not from 1 to 12\."),
    ("0 0 1 13 *", r"field 'month', '13' is not from 1 to 12\."),
    ("0 8 * * 7", r"field 'weekday', '7' is not from 0 to 6\. Sunday is 0\."),
    ("0 8 * * 6-7", r"field 'weekday', '6-7' is not from 0 to 6\. Sunday is 0\."),
    ("0 8 * * 0,7", r"field 'weekday', '7' is not"),
    ("0 0 0-5 * *", r"field 'day of month', '0-5' is not from 1 to 31"),
    ("50-60 * * * *", r"field 'minute', '50-60' is not from"),
    # ranges and steps
    ("10-5 * * * *", r"field 'minute', '10-5' is a range that runs backwards\. Write two ranges"),
    ("0 22-2 * * *", r"field 'hour', '22-2' is a range that runs backwards"),
    ("5/15 * * * *", r"field 'minute', '5/15' has a step, but no range\. Write 5-59/n"),
    ("0 0 2/3 * *", r"field 'day of month', '2/3' has a step, but no range\. Write 2-31/n"),
    ("*/0 * * * *", r"field 'minute', '\*/0' has a step that is not from 1 to 59"),
    ("*/60 * * * *", r"'\*/60' has a step that is not from 1 to 59"),
    ("*/90 * * * *", r"'\*/90' has a step that is not from 1 to 59"),
    ("0 */24 * * *", r"field 'hour', '\*/24' has a step that is not from 1 to 23"),
    ("0 */25 * * *", r"'\*/25' has a step"),
    ("0 0 */31 * *", r"'\*/31' has a step that is not from 1 to 30"),
    ("0 0 1 */12 *", r"'\*/12' has a step that is not from 1 to 11"),
    ("0 0 * * */7", r"'\*/7' has a step that is not from 1 to 6"),
    ("1-5/0 * * * *", r"'1-5/0' has a step"),
    ("1-5/-2 * * * *", r"'1-5/-2' is no value, range or step\. Write \*, a, a-b, \*/n or a-b/n"),
    ("-5 * * * *", r"'-5' is no value"),
    ("5- * * * *", r"'5-' is no value"),
    ("+5 * * * *", r"'\+5' is no value"),
    ("5.0 * * * *", r"'5\.0' is no value"),
    ("1-2-3 * * * *", r"'1-2-3' is no value"),
    ("*/ * * * *", r"'\*/' is no value"),
    ("*/5/2 * * * *", r"'\*/5/2' is no value"),
    ("** * * * *", r"'\*\*' is no value"),
    ("*-5 * * * *", r"'\*-5' is no value"),
    ("*5 * * * *", r"'\*5' is no value"),
    ("005 * * * *", r"'005' is no value"),
    # lists
    ("1, * * * *", r"field 'minute', '' is no value"),
    (",1 * * * *", r"field 'minute', '' is no value"),
    ("1,,2 * * * *", r"field 'minute', '' is no value"),
    ("* * * * *,0", r"field 'weekday', '\*' stands in a list"),
    ("*,5 * * * *", r"field 'minute', '\*' stands in a list"),
    ("0 0 *,13 * 5", r"field 'day of month', '\*' stands in a list"),
    # what other crons know
    ("0 8 * * sun", r"field 'weekday', 'sun' is no value"),
    ("0 0 1 JAN-mar *", r"field 'month', 'JAN-mar' is no value"),
    ("0 0 * * MON-FRI", r"field 'weekday', 'MON-FRI' is no value"),
    ("0 0 L * *", r"field 'day of month', 'L' is no value"),
    ("0 0 15W * *", r"'15W' is no value"),
    ("0 0 ? * 1", r"'\?' is no value"),
    ("0 0 * * 5#2", r"'5#2' is no value"),
    ("0 0 * * 5L", r"'5L' is no value"),
    ("H * * * *", r"'H' is no value"),
    ("~ * * * *", r"'~' is no value"),
    ("0-30~5 * * * *", r"'0-30~5' is no value"),
    ("\u0665 * * * *", r"field 'minute', '\u0665' is no value"),  # int() would read this digit
    ("1-\u0665 * * * *", r"is no value"),
    ("*/\u0665 * * * *", r"is no value"),
    ("\u00b2 * * * *", r"is no value"),
    ("\ud800 * * * *", r"field 'minute', '\\ud800' is no value"),
    ("0\x00 * * * *", r"'0\\x00' is no value"),
    ("nonsense", r"must have 5 fields"),
    ("five words of no meaning", r"field 'minute', 'five' is no value"),
    (f"{'1' * 100} * * * *", r"field 'minute', '1{19}…' is no value"),
    # macros
    ("@daily", r"only '@every' is known; got '@daily'\. Write '0 0 \* \* \*'\."),
    ("@hourly", r"got '@hourly'\. Write '0 \* \* \* \*'\."),
    ("@reboot", r"got '@reboot'\. Write the five fields of cron\."),
    ("@fortnightly", r"got '@fortnightly'\. Write the five"),
    ("@", r"only '@every' is known; got '@'"),
    ("@Every 5m", r"only '@every' is known; got '@Every'"),
    # dates that never come
    ("0 0 30 2 *", r"No month of '2' has day of month of '30': the spec would never be due\. Correct"),
    ("0 0 31 4 *", r"never be due"),
    ("0 0 31 2,4,6,9,11 *", r"No month of '2,4,6,9,11' has day of month of '31'"),
    ("0 0 30-31 2 0-6", r"No month of '2' has day of month of '30-31'"),
]


@pytest.mark.req("A1")
@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=lambda value: repr(value)[:40])
def test_everything_else_is_refused_with_field_and_remedy(spec: Any, message: str) -> None:
    with pytest.raises(InvalidSpec, match=message) as raised:
        parse(spec)
    assert raised.value.code == "invalid_spec"
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


def test_impossible_days_are_refused_and_possible_ones_come() -> None:
    """Every day of every month against eight years of a calendar."""
    days = [date(2024, 1, 1) + timedelta(days=n) for n in range(8 * 366)]
    comes: dict[tuple[int, int], date] = {}
    for day in days:
        comes.setdefault((day.month, day.day), day)
    assert len(comes) == 366
    for month in range(1, 13):
        for number in range(1, 32):
            if (month, number) in comes:
                first = parse(f"0 0 {number} {month} *").next_after(at("2023-12-31"))
                assert first is not None
                assert to_datetime(first).date() == comes[month, number]
            else:
                for both, weekday in ((False, "*"), (True, "*"), (True, "1-5")):
                    with pytest.raises(InvalidSpec, match="never be due"):
                        parse(f"0 0 {number} {month} {weekday}", both=both)
                assert (
                    parse(f"0 0 {number} {month} 1-5").next_after(at("2024-01-01")) is not None
                )  # the weekday carries it


def test_a_leap_day_on_one_weekday_is_found_decades_away() -> None:
    leap_days = [date(year, 2, 29) for year in range(1972, 2400) if year % 4 == 0 and (year % 100 or year % 400 == 0)]
    longest = 0
    for weekday in range(7):
        spec = parse(f"0 0 29 2 {weekday}", both=True)
        expected = [day for day in leap_days if day.isoweekday() % 7 == weekday]
        found = [to_datetime(slot).date() for slot in spec.slots(at("1970-01-01"), at("2400-01-01"), ALL)]
        assert found == expected
        for earlier, later in pairwise(expected):
            longest = max(longest, later.year - earlier.year)
            assert spec.next_after(at(str(earlier))) == at(str(later))
            assert spec.latest(0, at(str(later)) - 1) == at(str(earlier))
    assert longest == 40


PIECES = [*"0123456789", *"*****-/,,,     @#?LW\t\n\u0665", "@every ", "5m", "* * ", "/2", "mon"]
pieces = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
five = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join), min_size=5, max_size=5)


@pytest.mark.req("A1")
@many
@given(st.one_of(pieces, st.text(max_size=20), five.map(" ".join)))
@example("* * * * *,0")
@example("@every " + "9" * 400)
@example("0" * 10_000)
def test_any_text_is_refused_or_works(text: str) -> None:
    try:
        spec = parse(text)
    except InvalidSpec as error:
        refused: InvalidSpec | None = error
    else:
        refused = None
    if refused:
        assert len(str(refused)) < 300
        return
    assert re.fullmatch(r"[*0-9/, @everysmhd-]+", text)
    now = at("2026-01-01")
    following = spec.next_after(now)
    assert following is not None
    assert following > now
    assert parse(str(spec)) == spec


def test_a_message_shows_only_the_beginning_of_what_was_written() -> None:
    for spec in (f"* * {'x' * 100}p4ssw0rd * *", f"@{'x' * 50}p4ssw0rd", f"@every {'x' * 50}p4ssw0rd", "p4ssw0rd"):
        with pytest.raises(InvalidSpec) as raised:
            parse(spec)
        assert "p4ssw0rd" not in str(raised.value)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    "numbers", [(), (-1,), (60,), (True,), (1.0,), ("1",), (None,), pytest.param((10**5000,), id="huge")]
)
def test_sets_are_checked_as_strictly_as_text(index: int, numbers: tuple[Any, ...]) -> None:
    sets: list[Any] = [(0,), (0,), (1,), (1,), (0,)]
    sets[index] = numbers
    with pytest.raises(InvalidSpec, match=rf"cron field '{FIELDS[index].name}' (must be made of ints|names no number)"):
        Cron(*sets)


def test_the_error_is_public_and_an_invalid_argument() -> None:
    assert dbqueue.InvalidSpec is dbqueue.errors.InvalidSpec
    assert issubclass(dbqueue.InvalidSpec, dbqueue.InvalidArgument)


# -- against calendars that are walked minute by minute ------------------------------------------------------------------

ZONES = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # half an hour
    "Africa/Casablanca",  # its summer time stops for a lunar month
    "Asia/Kathmandu",  # no summer time; a quarter of an hour
    "Africa/Cairo",  # at midnight: the day begins at one, or its last hour comes twice
    "America/Havana",  # at midnight: the first hour comes twice
)


@lru_cache(maxsize=100)
def walked(zone: str, start: int, minutes: int) -> dict[date, dict[int, int]]:
    """For each day and minute of the day on wall clocks: the instant, from ``start`` on, at which the zone's clocks first reach or
    pass it.

    So a skipped one belongs to the first instant after the gap, and a repeated one to its first time: that is the rule.
    """
    tz = ZoneInfo(zone)
    reached: dict[date, dict[int, int]] = {}
    # From four hours earlier on, for a repeated hour that begins before the start.
    seen = datetime.fromtimestamp(start // SECOND - 241 * 60, tz).replace(tzinfo=None)
    for minute in range(-240, minutes):
        instant = start + minute * MINUTE
        now = datetime.fromtimestamp(instant // SECOND, tz).replace(tzinfo=None)
        while seen < now:
            seen += timedelta(minutes=1)
            if minute >= 0:
                reached.setdefault(seen.date(), {})[seen.hour * 60 + seen.minute] = instant
    return reached


@cache
def changes(zone: str) -> list[int]:
    """The hours of 2024 to 2100 in which the zone's distance from UTC changes; New Year of some years where it never does."""
    tz, found = ZoneInfo(zone), []

    def offset(hour: int) -> timedelta | None:
        return datetime.fromtimestamp(hour * 3_600, tz).utcoffset()

    first, last = at("2024-01-01") // (3_600 * SECOND), at("2101-01-01") // (3_600 * SECOND)
    for day in range(first, last, 24):
        if offset(day) != offset(day + 24):
            hour = next(hour for hour in range(day, day + 24) if offset(hour) != offset(hour + 1))
            found.append(hour * 3_600 * SECOND)
    return found or [at(f"{year}-01-01") for year in range(2024, 2101, 4)]


def check(one: Written, zone: str, start: int, minutes: int, moments: list[int]) -> None:
    """Every answer about the window, against the walk."""
    times = [hour * 60 + minute for hour in one.numbers(1) for minute in one.numbers(0)]
    days = walked(zone, start, minutes)
    expected = sorted({days[day][time] for day in one.due_on(days) for time in times if time in days[day]})
    spec = cron_of(one.text, zone, both=one.both)
    before, end = start - 1, start + (minutes - 1) * MINUTE
    slots = spec.slots(before, end, ALL)
    assert slots == expected, shown(sorted({*slots} ^ {*expected}))
    assert all(slot % MINUTE == 0 for slot in expected)
    for moment in moments:
        moment = before + moment % (end - before)
        index = bisect_right(expected, moment)
        earlier = max(before, moment - 100 * MINUTE)
        assert spec.slots(earlier, moment, ALL) == expected[bisect_right(expected, earlier) : index]
        assert spec.slots(moment, end, 3) == expected[index : index + 3]
        assert spec.latest(before, moment) == (expected[index - 1] if index else None)
        following = spec.next_after(moment)
        assert following is not None
        if index < len(expected):
            assert following == expected[index]
        else:
            assert following > end
            assert spec.latest(moment, end) is None


@settings(many, max_examples=600)
@given(specs, st.sampled_from(ZONES), st.integers(0, 10**6), st.lists(st.integers(0, 10**12), min_size=3, max_size=3))
def test_where_the_clocks_change(one: Written, zone: str, which: int, moments: list[int]) -> None:
    some = changes(zone)[::13]  # of spring and of autumn; test_whole_years has more
    change = some[which % len(some)]
    near = [30 * 60 * MINUTE + moment % (180 * MINUTE) for moment in moments]
    check(one, zone, change - 30 * 60 * MINUTE, 54 * 60, [*moments, *near])


@settings(many, max_examples=150)
@given(
    specs,
    st.sampled_from(
        [
            ("Pacific/Apia", "2011-12-29"),  # a whole day was left out
            ("America/St_Johns", "2010-11-06"),  # one minute past midnight became yesterday
            ("America/St_Johns", "2011-03-12"),
            ("Pacific/Kiritimati", "1994-12-30"),  # a day, and the year 1994 with it
            ("Asia/Pyongyang", "2018-05-03"),
            ("Antarctica/Troll", "2026-10-24"),  # two hours
            ("UTC", "2028-02-28"),
        ]
    ),
    st.lists(st.integers(0, 10**12), min_size=6, max_size=6),
)
def test_where_clocks_did_strange_things(one: Written, place: tuple[str, str], moments: list[int]) -> None:
    check(one, place[0], at(place[1]), 3 * 1_440, moments)


ZERO = (Item("0", 0, 0),)
LEAP_MONDAY = Written((ZERO, ZERO, (Item("29", 29, 29),), (Item("2", 2, 2),), (Item("1", 1, 1),)), both=True)


@many
@given(specs, st.integers(0, 76 * 365), st.sampled_from((40, 200, 800)))
@example(LEAP_MONDAY, 0, 28_490)
def test_the_days_of_2024_to_2100(one: Written, first: int, length: int) -> None:
    start = at("2024-01-01") + first * DAY
    spec = cron_of(one.text, both=one.both)
    minute, hour = spec.minutes[-1], spec.hours[-1]
    time_of_day = (hour * 60 + minute) * MINUTE
    days = one.due_on(date(2024, 1, 1) + timedelta(days=first + n) for n in range(length))
    expected = [(day - date(1970, 1, 1)).days * DAY + time_of_day for day in days]
    at_one_time = Cron((minute,), (hour,), spec.days, spec.months, spec.weekdays, both=one.both)
    assert at_one_time.slots(start - 1, start + length * DAY - 1, ALL) == expected
    assert at_one_time.latest(start - 1, start + length * DAY - 1) == (expected[-1] if expected else None)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("year", [2024, 2027, 2037, 2038, 2100])
@pytest.mark.parametrize("zone", ZONES[:5])
def test_whole_years(zone: str, year: int) -> None:
    start, end = at(f"{year}-01-01"), at(f"{year + 1}-01-01")

    @settings(many, max_examples=25)
    @given(specs, st.lists(st.integers(0, 10**14), min_size=3, max_size=3))
    def every_minute(one: Written, moments: list[int]) -> None:
        check(one, zone, start, (end - start) // MINUTE, moments)

    every_minute()
    walked.cache_clear()


@settings(many, max_examples=300)
@given(specs, st.integers(at("2024-01-01") // SECOND, at("2100-01-01") // SECOND))
def test_croniter_agrees_in_utc(one: Written, second: int) -> None:
    from croniter import croniter

    spec = parse(one.text, both=one.both)
    # Written out in its own canonical text, because croniter takes what names all values for a restriction.
    text, start = str(spec).removesuffix(" both"), to_datetime(second * SECOND)
    theirs = croniter(text, start, day_or=not one.both, max_years_between_matches=60)
    after = second * SECOND
    for _ in range(4):
        following = spec.next_after(after)
        assert following == to_instant(theirs.get_next(datetime))
        after = following
    theirs.set_current(start, force=True)
    assert spec.latest(0, second * SECOND - 1) == to_instant(theirs.get_prev(datetime))


# -- intervals -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("A1")
@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ("@every 1s", 1),
        ("@every 90s", 90),
        ("@every 5m", 300),
        ("@every 36h", 129_600),
        ("@every 366d", 31_622_400),
        ("@every 31622400s", 31_622_400),
    ],
)
def test_intervals(spec: str, seconds: int) -> None:
    assert parse(spec) == Every(seconds)


@pytest.mark.req("A1")
@pytest.mark.parametrize(
    "rest",
    [
        *["", " ", " 5", " m", " 0s", " -5m", " +5m", " 1.5h", " 5 m", "  5m", " 5m ", " 5M", " 5ms", " 5w", " 1h30m"],
        *[" 367d", " 8785h", " 31622401s", " 9999999999s", "5m"],
        " 5m\n",
        "\t5m",
        " \u0665m",
    ],
)
def test_intervals_are_positive_whole_and_at_most_a_year(rest: str) -> None:
    with pytest.raises(InvalidSpec, match=r"@every.* positive whole number .*s, m, h, d|only '@every' is known"):
        parse(f"@every{rest}")


@pytest.mark.parametrize("seconds", [0, -1, 1.0, True, None, "60", 31_622_401, pytest.param(10**5000, id="huge")])
def test_an_interval_is_checked_wherever_it_comes_from(seconds: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"^@every must be a positive whole number"):
        Every(seconds)


@pytest.mark.req("A1")
def test_an_interval_has_no_zone() -> None:
    assert parse("@every 1d", "UTC") == Every(86_400)
    with pytest.raises(InvalidSpec, match=r"has no timezone\. Leave the timezone out, or write a cron spec"):
        parse("@every 1d", "Europe/Berlin")
    with pytest.raises(InvalidSpec, match="is not known here"):
        parse("@every 1d", "Europe/Atlantis")


def test_boundaries_are_counted_from_the_anchor() -> None:
    spec = parse("@every 10s").anchored(at("2026-01-01T00:00") + 3)
    first = at("2026-01-01T00:00") + 3
    assert spec.next_after(first) == first + 10 * SECOND
    assert spec.next_after(first - 1) == first
    assert spec.next_after(first + 10 * SECOND - 1) == first + 10 * SECOND
    assert spec.slots(first, first + 60 * SECOND, 3) == [first + n * 10 * SECOND for n in (1, 2, 3)]
    assert spec.slots(first, first + 20 * SECOND, ALL) == [first + n * 10 * SECOND for n in (1, 2)]
    assert spec.slots(first, first, ALL) == []
    assert spec.slots(first, first + DAY, 0) == []
    assert spec.latest(first, first + 10 * SECOND) == first + 10 * SECOND
    assert spec.latest(first, first + 10 * SECOND - 1) is None
    assert str(spec) == "@every 10s"
    assert spec == spec.anchored(first)
    assert spec != parse("@every 10s")


@many
@given(
    st.one_of(st.integers(1, 100), st.integers(1, cron.MAX_EVERY)),
    st.integers(0, at("2100-01-01")),
    st.integers(0, at("2100-01-01")),
    st.integers(0, 2_000),
    st.integers(0, DAY),
)
def test_intervals_against_counting(seconds: int, anchor: int, after: int, count: int, rest: int) -> None:
    step = seconds * SECOND
    until = after + count * step + rest % step
    spec = Every(seconds, anchor)
    expected = [n for n in range(anchor - ((anchor - after) // step + 2) * step, until + 1, step) if n > after]
    assert spec.slots(after, until, ALL) == expected
    assert spec.slots(after, until, 64) == expected[:64]
    assert spec.latest(after, until) == (expected[-1] if expected else None)
    following = spec.next_after(after)
    assert after < following <= after + step
    assert (following - anchor) % step == 0


# -- zones ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "zone", ["UTC", "Etc/UTC", "Etc/GMT+5", "GB", "America/Argentina/Buenos_Aires", "America/Port-au-Prince"]
)
def test_zones(zone: str) -> None:
    spec = cron_of("0 12 * * *", zone)
    following = spec.next_after(at("2026-01-01"))
    assert following is not None
    assert to_datetime(following).astimezone(ZoneInfo(zone)).hour == 12


@pytest.mark.parametrize(
    "zone",
    [
        "",
        "Europe/Atlantis",
        "Europe",  # a directory
        "Europe/Berlin ",
        "Europe/Berlin\n",
        "Europe/Berlin\x00",
        "/etc/localtime",
        "/usr/share/zoneinfo/Europe/Berlin",
        "../zoneinfo/Europe/Berlin",
        "Europe/../Europe/Berlin",
        "Europe//Berlin",
        "zone.tab",  # files that are no zones
        "tzdata.zi",
        "leapseconds",
        "localtime",  # what the node is set to
        "posixrules",
        "Factory",
        "right/Europe/Berlin",  # counts leap seconds
        "posix/Europe/Berlin",
        "+01:00",
        "UTC+1",
        "\ud800",
        "Ä/Ö",
        "Europe.Berlin",
        "__init__.py",
        "America/Argentina",
        "A" * 65,
        "A" * 100_000,
    ],
)
def test_no_zones(zone: str) -> None:
    with pytest.raises(
        InvalidSpec, match=r"^timezone '.*' is not known here\. Write an IANA name .*tzdata\.$"
    ) as raised:
        parse("0 12 * * *", zone)
    assert len(str(raised.value)) < 250
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("zone", [None, 1, b"UTC", timezone.utc, ZoneInfo("Europe/Berlin")])
def test_a_zone_is_a_name(zone: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"^timezone must be a str such as 'UTC' .*; got \w+\. Write one"):
        parse("0 12 * * *", zone)


def test_utc_needs_no_database_of_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(cron, "ZoneInfo", missing)
    assert parse("0 12 * * *").next_after(at("2026-01-01")) == at("2026-01-01T12:00")
    with pytest.raises(InvalidSpec, match="install the package tzdata"):
        parse("0 12 * * *", "Europe/Berlin")


@pytest.fixture
def node_far_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    assert time.timezone == -14 * 3_600
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.req("H14", "H1")
@pytest.mark.usefixtures("node_far_away")
@pytest.mark.parametrize(("spec", "zone", "after", "expected"), [KNOWN[0], KNOWN[8], *KNOWN[26:35]])
def test_the_zone_of_the_node_does_not_matter(spec: str, zone: str, after: str, expected: list[str]) -> None:
    assert shown(parse(spec, zone).slots(at(after), at("2200-01-01"), len(expected))) == expected


# -- bounded work, and values that can be shared ---------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_the_work_follows_the_answer_not_the_time_in_between(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    months: list[int] = []
    offsets: list[datetime] = []
    real, real_offset = cron.monthrange, cron._offset_of

    def counted(year: int, month: int) -> tuple[int, int]:
        months.append(month)
        return real(year, month)

    def counted_offset(shown: datetime) -> int:
        offsets.append(shown)
        return real_offset(shown)

    often, rare = parse("* * * * *", zone), parse("0 0 29 2 1", zone, both=True)
    monkeypatch.setattr(cron, "monthrange", counted)
    monkeypatch.setattr(cron, "_offset_of", counted_offset)
    assert often.latest(at("1990-01-01"), at("2026-06-15T12:00")) == at("2026-06-15T12:00")
    assert often.next_after(at("2026-06-15T12:00")) == at("2026-06-15T12:01")
    assert len(often.slots(at("1990-01-01"), at("2026-01-01"), 256)) == 256
    assert months == [6, 6, 1]  # no month but that of the answer
    assert len(offsets) == (6 if zone != "UTC" else 0)  # no day but that of the answer: its two ends
    months.clear()
    assert rare.next_after(at("2072-03-01")) is not None
    assert rare.latest(0, at("2096-01-01")) is not None
    assert set(months) == {2}
    assert len(months) <= 2 * 41
    months.clear()
    with pytest.raises(InvalidSpec):
        parse("0 0 30 2 *", zone)
    assert months == [2]


def test_the_calendar_has_two_ends() -> None:
    spec = parse("0 0 1 1 *", "Asia/Tokyo")
    assert spec.next_after(-(10**30)) == at("1970-12-31T15:00")
    assert spec.next_after(10**30) is None
    assert spec.slots(10**29, 10**30, 5) == []
    assert spec.latest(-(10**30), -(10**20)) is None
    last = spec.latest(0, 10**30)
    assert last is not None
    assert to_datetime(last).year >= 9995
    assert spec.slots(0, at("2026-01-01"), 0) == []
    assert spec.slots(at("2026-01-01"), at("2020-01-01"), 5) == []


@pytest.mark.parametrize("spec", [parse("*/5 1 * * 1-5", "Europe/Berlin"), parse("0 0 13 * 5", both=True), Every(7, 9)])
def test_specs_are_values(spec: cron.Spec) -> None:
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert copy.next_after(at("2026-01-01")) == spec.next_after(at("2026-01-01"))
    assert len({copy, spec}) == 1
    with pytest.raises(FrozenInstanceError):
        setattr(spec, fields(spec)[0].name, 5)
    assert spec.anchored(9) == spec
