"""When a schedule is due: cron's five fields in a time zone, and fixed intervals. Pure arithmetic; the caller brings the time.

    minute  hour  day of month  month  weekday          parse("*/15 9-17 * * 1-5", "Europe/Berlin")
    0-59    0-23  1-31          1-12   0-6, Sunday 0    parse("@every 90s")

A field is ``*``, or a list of values ``a``, closed ranges ``a-b`` and steps ``*/n``, ``a-b/n``, parted by commas; fields are
parted by one space (D15). Everything else is ``InvalidSpec``: names, 7 for Sunday, ``5/15``, ranges that run backwards, a
``*`` inside a list, a step of zero or as large as its field (``*/60``), macros, seconds. A spec whose date never comes
(30 February) is refused too.

**Day of month and weekday.** A field is *restricted* when it does not name every value of its range: ``*``, ``*/1`` and
``0-6`` are the same, while ``*/2`` is restricted like ``1,3,5``. If both fields are restricted, a day that matches either is
due. ``both=True`` asks for both instead, as Celery's ``crontab`` does. If one is restricted, that one counts.

**Time zones.** A spec names wall-clock minutes of its zone, and each is due once. A minute that the clocks skip is due at the
first instant after the gap; several of them, and the minute that the clocks go on with, are one slot. A minute that the clocks
repeat is due the first time only, so ``0 * * * *`` in such a zone leaves one hour out in autumn, and ``* * * * *`` sixty
minutes: what has to run so often belongs into UTC, or into ``@every``.

**Intervals.** ``@every <n><s|m|h|d>`` is due at whole multiples counted from an anchor, an instant that the caller gives to
``anchored``. A day is 24 hours; no wall clock is asked, so a zone is refused.

Instants are whole microseconds since 1970 (``dbqueue.clock``). Nothing here reads a clock: which minute it is, the database
says (H14). The slots of a cron spec before 1970 or after the year 9997 are not looked for.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

from dbqueue.clock import SECOND, to_datetime
from dbqueue.errors import InvalidSpec
from dbqueue.settings import describe

MAX_SPEC = 500
"""Characters. The longest lists of all five fields have fewer."""
MAX_EVERY = 366 * 86_400
"""Seconds between two boundaries of ``@every``: a year. Who waits longer means a date."""

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


class Field(NamedTuple):
    name: str
    low: int
    high: int
    hint: str = ""


FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12),
    Field("weekday", 0, 6, " Sunday is 0."),
)

_SHAPE = "minute, hour, day of month, month and weekday, with one space between them"
_ITEM = re.compile(r"(?:(?P<star>\*)|(?P<low>[0-9]{1,2})(?:-(?P<high>[0-9]{1,2}))?)(?:/(?P<step>[0-9]{1,2}))?")
_EVERY = re.compile(r"@every ([0-9]{1,9})([smhd])")
_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

# Files in the system's directory of zones that name no zone: what the node is set to, and zones that count leap seconds.
_NO_ZONE = re.compile(r"localtime|posixrules|Factory|(posix|right)/.*")

_MICROSECOND = timedelta(microseconds=1)
_MINUTE = 60 * SECOND
_DAY = 86_400 * SECOND
_FIRST_DAY = date(1970, 1, 1).toordinal()
_FIRST_YEAR, _LAST_YEAR = 1970, 9997
_LAST_INSTANT = (date(_LAST_YEAR, 12, 31).toordinal() - _FIRST_DAY) * _DAY


@dataclass(frozen=True, slots=True)
class Cron:
    """Five sets of numbers in a zone. ``parse`` makes it of text; whoever has the sets already, as Celery's ``crontab`` does,
    gives them here, in any order. ``both``: day of month *and* weekday must match. Raises InvalidSpec.

    Specs whose fields name the same numbers are equal, however they were written.
    """

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    timezone: str = "UTC"
    both: bool = False
    _zone: ZoneInfo | None = field(init=False, repr=False, compare=False)
    _either: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def keep(name: str, kept: object) -> None:
            object.__setattr__(self, name, kept)  # the class is frozen

        for name, rule, numbers in zip(_SETS, FIELDS, self._sets(), strict=True):
            keep(name, _numbers(rule, numbers))
        restricted = _restricted(FIELDS[2], self.days) and _restricted(FIELDS[4], self.weekdays)
        keep("both", restricted and bool(self.both))  # where it makes no difference, it is none
        keep("_either", restricted and not self.both)
        if not self._either and not any(
            day <= monthrange(2000, month)[1] for month in self.months for day in self.days
        ):
            raise InvalidSpec(
                f"No {_names(FIELDS[3], self.months)} has {_names(FIELDS[2], self.days)}: the spec would never be due. "
                "Correct the day of month or the month."
            )
        keep("_zone", _zone(self.timezone))

    def __str__(self) -> str:
        """The canonical text: equal for equal specs, and the other way round. It goes into fingerprints, so the text of a spec
        stays the same in every version."""
        fields = " ".join(_text(rule, numbers) for rule, numbers in zip(FIELDS, self._sets(), strict=True))
        return fields + (" both" if self.both else "") + (f" {self.timezone}" if self.timezone != "UTC" else "")

    def anchored(self, anchor: int) -> Cron:
        """Itself: a wall clock has no other anchor."""
        return self

    def next_after(self, instant: int) -> int | None:
        """The first slot after ``instant``; None only at the end of the calendar."""
        return next((slot for slot in self._walk(instant) if slot > instant), None)

    def slots(self, after: int, until: int, limit: int) -> list[int]:
        """The first ``limit`` slots with ``after < slot <= until``, in order."""
        found: list[int] = []
        if after >= until or limit < 1:
            return found
        for slot in self._walk(after):
            if slot > until:
                break
            if slot > after:
                after = slot
                found.append(slot)
                if len(found) == limit:
                    break
        return found

    def latest(self, after: int, until: int) -> int | None:
        """The last slot with ``after < slot <= until``, looked for backwards."""
        slot = next((slot for slot in self._walk(until, back=True) if slot <= until), None)
        return slot if slot is not None and slot > after else None

    def _sets(self) -> tuple[tuple[int, ...], ...]:
        return self.minutes, self.hours, self.days, self.months, self.weekdays

    def _walk(self, instant: int, back: bool = False) -> Iterator[int]:
        """The slots in order, from the wall-clock hour of ``instant`` on (or back). The first few may still lie on its other
        side, and skipped minutes give the same instant several times."""
        start = self._wall(instant, back)
        order: Callable[[Any], Iterable[int]] = reversed if back else iter
        for day in self._dates(start, back):
            first = day == start.toordinal()
            midnight = (day - _FIRST_DAY) * _DAY
            offset = self._offset(day)
            for hour in order(self.hours):
                if first and (hour > start.hour if back else hour < start.hour):
                    continue
                for minute in order(self.minutes):
                    wall = midnight + (hour * 60 + minute) * _MINUTE
                    yield self._instant(wall) if offset is None else wall - offset

    def _dates(self, start: datetime, back: bool) -> Iterator[int]:
        """The ordinals of the matching days from ``start`` on (or back)."""
        order: Callable[[Any], Iterable[int]] = reversed if back else iter
        # Every spec that passed the check comes within 40 years (a 29 February on one given weekday around 2100, no leap year).
        # A zone's 1970 may begin in our 1969.
        years = range(start.year, _FIRST_YEAR - 2, -1) if back else range(start.year, _LAST_YEAR + 1)
        for year in years:
            for month in order(self.months):
                if year == start.year and (month > start.month if back else month < start.month):
                    continue
                before = date(year, month, 1).toordinal() - 1
                now = (year, month) == (start.year, start.month)
                for day in order(range(1, monthrange(year, month)[1] + 1)):
                    if now and (day > start.day if back else day < start.day):
                        continue
                    by_day = day in self.days
                    by_weekday = (before + day) % 7 in self.weekdays  # day 1 of the calendar was a Monday
                    if (by_day or by_weekday) if self._either else (by_day and by_weekday):
                        yield before + day

    def _wall(self, instant: int, back: bool) -> datetime:
        """What the zone's clocks show at ``instant``. Backwards from the second round of a repeated hour: what they showed
        last in the first round, because all of that is past."""
        utc = to_datetime(min(max(instant, 0), _LAST_INSTANT))
        if self._zone is None:
            return utc
        wall = utc.astimezone(self._zone)
        if back and wall.fold:
            repeated = _offset_of(wall.replace(fold=0)) - _offset_of(wall)
            wall = wall.replace(tzinfo=None) + repeated * _MICROSECOND
        return wall

    def _offset(self, day: int) -> int | None:
        """The zone's distance from UTC on a day; None when it changes on that day. No zone changes twice on one day and ends
        where it began."""
        if self._zone is None:
            return 0
        begins = _offset_of(datetime.fromordinal(day).replace(tzinfo=self._zone))
        ends = _offset_of(datetime.fromordinal(day + 1).replace(tzinfo=self._zone, fold=1))
        return begins if begins == ends else None

    def _instant(self, wall: int) -> int:
        """When the zone's clocks show ``wall`` for the first time, or else first show something later."""
        shown = to_datetime(wall).replace(tzinfo=self._zone)
        # Of a repeated time this is the first offset; of a skipped one, that before the gap and that after it.
        before, after = _offset_of(shown), _offset_of(shown.replace(fold=1))
        if before >= after:
            return wall - before
        low, high = (wall - after) // SECOND, (wall - before) // SECOND  # the clocks change in between
        while high - low > 1:
            middle = (low + high) // 2
            if _offset_of(to_datetime(middle * SECOND).astimezone(self._zone)) == before:
                low = middle
            else:
                high = middle
        return high * SECOND


@dataclass(frozen=True, slots=True)
class Every:
    """``anchor + n * seconds`` for every whole n, the negative ones too. Raises InvalidSpec."""

    seconds: int
    anchor: int = 0
    """An instant, not a part of the canonical text."""

    def __post_init__(self) -> None:
        if type(self.seconds) is not int or not 1 <= self.seconds <= MAX_EVERY:
            raise InvalidSpec(
                f"@every must be a positive whole number and one of the units s, m, h, d, at most {MAX_EVERY // 86_400}d; "
                f"got {describe(self.seconds)} (seconds). Correct it, or write a cron spec."
            )

    def __str__(self) -> str:
        """The canonical text, in the largest unit that fits: ``@every 60s`` and ``@every 1m`` are the same."""
        unit = next(unit for unit, seconds in UNITS.items() if self.seconds % seconds == 0)
        return f"@every {self.seconds // UNITS[unit]}{unit}"

    def anchored(self, anchor: int) -> Every:
        """The same interval, counted from the instant ``anchor``."""
        return replace(self, anchor=anchor)

    def next_after(self, instant: int) -> int:
        """The first boundary after ``instant``."""
        return self._at_or_before(instant) + self.seconds * SECOND

    def slots(self, after: int, until: int, limit: int) -> list[int]:
        """The first ``limit`` boundaries with ``after < boundary <= until``, in order."""
        return list(range(self.next_after(after), until + 1, self.seconds * SECOND)[: max(limit, 0)])

    def latest(self, after: int, until: int) -> int | None:
        """The last boundary with ``after < boundary <= until``."""
        boundary = self._at_or_before(until)
        return boundary if boundary > after else None

    def _at_or_before(self, instant: int) -> int:
        return instant - (instant - self.anchor) % (self.seconds * SECOND)


Spec: TypeAlias = Cron | Every


def parse(spec: str, timezone: str = "UTC", *, both: bool = False) -> Spec:
    """``spec`` in the zone of that IANA name. ``both``: see the top of this file. Raises InvalidSpec; asks no database."""
    if not isinstance(spec, str):
        raise InvalidSpec(
            f"A spec must be a str such as '*/15 * * * *' or '@every 5m'; got {type(spec).__name__}. Write one."
        )
    if len(spec) > MAX_SPEC:
        raise InvalidSpec(
            f"A spec must have at most {MAX_SPEC} characters; it has {len(spec)}. Write ranges and steps."
        )
    if spec.startswith("@"):
        return _every(spec, timezone)
    parts = spec.split(" ")
    if len(parts) != len(FIELDS) or "" in parts:
        raise InvalidSpec(_wrong_shape(spec))
    minutes, hours, days, months, weekdays = (_parse(rule, part) for rule, part in zip(FIELDS, parts, strict=True))
    return Cron(minutes, hours, days, months, weekdays, timezone, both)


def _every(spec: str, timezone: str) -> Every:
    match = _EVERY.fullmatch(spec)
    if match is None:
        word = spec.split(" ")[0]
        if word == "@every":
            raise InvalidSpec(
                "@every must be followed by one space, a positive whole number and one of the units s, m, h, d; "
                f"got {_shown(spec)}. Write '@every 5m'."
            )
        remedy = f"Write '{_MACROS[word]}'." if word in _MACROS else "Write the five fields of cron."
        raise InvalidSpec(f"Of the words that begin with @ only '@every' is known; got {_shown(word)}. {remedy}")
    if timezone != "UTC":
        _zone(timezone)
        raise InvalidSpec(
            "@every counts seconds and has no timezone. Leave the timezone out, or write a cron spec to follow a wall clock."
        )
    return Every(int(match[1]) * UNITS[match[2]])


def _wrong_shape(spec: str) -> str:
    parts = spec.split()
    if len(parts) != len(FIELDS):
        more = " Seconds and years cannot be given." if len(parts) > len(FIELDS) else ""
        return f"A cron spec must have {len(FIELDS)} fields: {_SHAPE}; got {len(parts)}.{more} Correct it."
    return f"The fields of a cron spec must be parted by exactly one space, and by nothing else: {_SHAPE}. Correct it."


def _parse(rule: Field, part: str) -> tuple[int, ...]:
    """The numbers that one field names."""
    numbers: set[int] = set()
    items = part.split(",")
    for item in items:
        match = _ITEM.fullmatch(item)
        if match is None:
            raise _wrong(
                rule,
                item,
                "is no value, range or step. Write *, a, a-b, */n or a-b/n with numbers of one or two digits.",
            )
        if match["star"]:
            low, high = rule.low, rule.high
            if len(items) > 1 and not match["step"]:
                raise _wrong(rule, item, "stands in a list. Write * alone, or leave it out.")
        else:
            low, high = int(match["low"]), int(match["high"] or match["low"])
            if match["step"] and not match["high"]:
                raise _wrong(rule, item, f"has a step, but no range. Write {low}-{rule.high}/n.")
        if not rule.low <= low <= rule.high or not rule.low <= high <= rule.high:
            raise _wrong(rule, item, f"is not from {rule.low} to {rule.high}.{rule.hint} Correct it.")
        if low > high:
            raise _wrong(rule, item, "is a range that runs backwards. Write two ranges, with a comma between them.")
        step = int(match["step"] or 1)
        if not 1 <= step <= rule.high - rule.low:
            raise _wrong(rule, item, f"has a step that is not from 1 to {rule.high - rule.low}. Correct it.")
        numbers.update(range(low, high + 1, step))
    return tuple(numbers)


def _wrong(rule: Field, item: str, what: str) -> InvalidSpec:
    return InvalidSpec(f"In the cron field '{rule.name}', {_shown(item)} {what}")


_SETS = ("minutes", "hours", "days", "months", "weekdays")


def _numbers(rule: Field, numbers: Iterable[object]) -> tuple[int, ...]:
    """The numbers of a field that somebody else has parsed."""
    kept: set[int] = set()
    for number in numbers:
        if type(number) is not int or not rule.low <= number <= rule.high:
            raise InvalidSpec(
                f"The cron field '{rule.name}' must be made of ints from {rule.low} to {rule.high}; got {describe(number)}."
                f"{rule.hint} Correct it."
            )
        kept.add(number)
    if not kept:
        raise InvalidSpec(
            f"The cron field '{rule.name}' names no number: the spec would never be due. Name one, or all."
        )
    return tuple(sorted(kept))


def _restricted(rule: Field, numbers: tuple[int, ...]) -> bool:
    return len(numbers) <= rule.high - rule.low


def _text(rule: Field, numbers: tuple[int, ...]) -> str:
    """The canonical text of one field: ``*``, or one step over all of it, or a list of values and ranges."""
    if not _restricted(rule, numbers):
        return "*"
    if len(numbers) > 2:
        step = numbers[1] - numbers[0]
        if step > 1 and numbers == tuple(range(rule.low, rule.high + 1, step)):
            return f"*/{step}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _names(rule: Field, numbers: tuple[int, ...]) -> str:
    return f"{rule.name} of '{_text(rule, numbers)}'"


def _zone(name: object) -> ZoneInfo | None:
    """The zone; None for UTC, which needs no database of zones."""
    if not isinstance(name, str):
        raise InvalidSpec(
            f"timezone must be a str such as 'UTC' or 'Europe/Berlin'; got {type(name).__name__}. Write one."
        )
    if name == "UTC":
        return None
    if not _NO_ZONE.fullmatch(name):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):  # no such file, no zone in it, a directory
            pass
    raise InvalidSpec(
        f"timezone {_shown(name)} is not known here. Write an IANA name such as 'Europe/Berlin'; if it is one, "
        "update the system's time zones or install the package tzdata."
    )


def _offset_of(shown: datetime) -> int:
    """Microseconds that the zone's clocks are ahead of UTC."""
    offset = shown.utcoffset()
    assert offset is not None  # every zone of zoneinfo knows it
    return offset // _MICROSECOND


def _shown(written: str) -> str:
    """The beginning of what somebody wrote, on one line."""
    return repr(written if len(written) <= 20 else written[:19] + "\u2026")
