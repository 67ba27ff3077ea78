"""The entries of a Celery app as schedules.

A ``crontab`` in a zone that has a name and an interval of whole seconds are arithmetic of ours (``cron``). Every other schedule is
asked, as Celery asks it: ``is_due(last_run_at)`` with the cursor, and when it says so the cursor moves to now.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab, schedule

from dbqueue import cron, schedules
from dbqueue.clock import SECOND, to_datetime
from dbqueue.errors import ConfigError, InvalidSpec
from dbqueue.schedules import Definition, Entry, Round

CATCH_UP, MAX_AGE = "dbqueue_catch_up", "dbqueue_max_age"
"""Options of an entry that are ours, and not its message's."""
AS_CELERY = "latest"
MOST_PAUSE = 300.0
"""Seconds after which a schedule that is asked is asked again at the latest, as in Celery."""
LONGEST_NAME, LONGEST_SPEC = 250, 300
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class AppEntry:
    """One entry: what is stored of it, what Celery makes of it, and when it is due (None: its schedule is asked)."""

    definition: Definition
    celery: ScheduleEntry
    options: dict[str, Any]
    spec: cron.Spec | None
    most_pause: float = MOST_PAUSE

    def next_at(self, row: Entry, last_slot: int, now: int) -> int | None:
        """When to look at it first."""
        return now if self.spec is None else self.spec.anchored(row.anchor).next_after(last_slot)

    def round(self, row: Entry, now: int) -> Round:
        """Its slots that are due, and where the cursor goes. Of a schedule that is asked the slot is where the cursor was."""
        if self.spec is not None:
            spec = self.spec.anchored(row.anchor)
            return schedules.next_round(spec, row.last_slot, now, catch_up=row.catch_up, max_age=row.max_age)
        if row.last_slot >= now:  # the clock went back
            return Round([], row.last_slot, now + SECOND)
        zone = self.celery.app.timezone
        with _clock_of(self.celery.schedule, to_datetime(now).astimezone(zone)):
            due, pause = self.celery.schedule.is_due(to_datetime(row.last_slot).astimezone(zone))
        again = now + round(self._bounded(pause) * SECOND)
        return Round([row.last_slot], now, again) if due else Round([], row.last_slot, again)

    def _bounded(self, pause: Any) -> float:
        try:
            seconds = float(pause)
        except (TypeError, ValueError):
            return self.most_pause
        return min(max(seconds, 0.001), self.most_pause) if math.isfinite(seconds) else self.most_pause

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """What is lazy among them is called now."""
        given, named = self.celery.args or (), self.celery.kwargs or {}
        args = [value() if isinstance(value, BeatLazyFunc) else value for value in given]
        return args, {name: value() if isinstance(value, BeatLazyFunc) else value for name, value in named.items()}


def read(app: Celery, owner: str, found: Mapping[str, ScheduleEntry]) -> dict[str, AppEntry]:
    """The entries by the names under which they are stored. Raises ConfigError, InvalidArgument, naming the entry."""
    entries: dict[str, AppEntry] = {}
    for name, entry in found.items():
        stored = stored_name(name)
        if stored in entries:
            raise ConfigError(
                f"two entries of the Celery app {owner} are named {stored!r}; give one of them another name"
            )
        entries[stored] = _read(app, owner, stored, entry)
    return entries


def stored_name(name: object) -> str:
    """A name that Celery made of a long signature is cut, and stays another one for other arguments."""
    text = str(name).replace("\0", "")
    if len(text) <= LONGEST_NAME:
        return text
    return f"{text[: LONGEST_NAME - 20]} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _read(app: Celery, owner: str, name: str, entry: ScheduleEntry) -> AppEntry:
    options = dict(entry.options or {})
    catch_up, max_age = options.pop(CATCH_UP, None), options.pop(MAX_AGE, None)
    try:
        spec, text, zone = _spec_of(entry.schedule)
    except Exception as error:
        what = str(error) if isinstance(error, InvalidSpec) else type(error).__name__
        raise ConfigError(
            f"the schedule of the entry {name!r} of the Celery app {owner} is not usable: {what}"
        ) from error
    if spec is None:
        if catch_up not in (None, AS_CELERY) or max_age is not None:
            raise ConfigError(
                f"the entry {name!r} of the Celery app {owner} has {CATCH_UP} or {MAX_AGE}, but which slots its schedule missed cannot "
                "be told: it fires once for the time missed. Take the options out"
            )
        catch_up = AS_CELERY
    elif catch_up is None:
        catch_up = app.conf.get("dbqueue_beat_catch_up") or AS_CELERY
    if max_age is None and isinstance(spec, cron.Cron) and app.conf.get("beat_cron_starting_deadline") is not None:
        max_age = max(1, app.conf.beat_cron_starting_deadline)
    queue = options.get("queue")
    definition = Definition(
        owner=owner, name=name, spec=text, timezone=zone, catch_up=catch_up,
        max_age=schedules.check_catch_up(name, catch_up, max_age), static=True, target=str(entry.task),
        queue=queue if isinstance(queue, str) else None, fingerprint=_fingerprint(entry.args, entry.kwargs, options),
    )  # fmt: skip
    return AppEntry(definition, entry, options, spec, app.conf.get("beat_max_loop_interval") or MOST_PAUSE)


# -- when it is due ----------------------------------------------------------------------------------------------------


def _spec_of(given: Any) -> tuple[cron.Spec | None, str, str]:
    """How it is due, its text, and its zone. A subclass may mean anything by its ``is_due``, so it is asked."""
    if type(given) is crontab:
        spec = cron.Cron(
            tuple(given.minute), tuple(given.hour), tuple(given.day_of_month), tuple(given.month_of_year), tuple(given.day_of_week),
            both=True,
        )  # fmt: skip
        zone = _name_of(given.remaining_delta(given.now())[0].tzinfo)  # in which Celery matches the fields
        if zone is not None:
            return replace(spec, timezone=zone), str(spec), zone
        return None, f"@crontab {spec}", str(given.app.timezone)[:LONGEST_SPEC]
    if type(given) is schedule:
        seconds = given.run_every.total_seconds()
        if not given.relative and seconds == int(seconds) and 1 <= seconds <= cron.MAX_EVERY:
            every = cron.Every(int(seconds))
            return every, str(every), "UTC"
        if not given.relative:
            return None, f"@every {seconds:g}s", "UTC"
        return None, f"@every {seconds:g}s relative", str(given.app.timezone)[:LONGEST_SPEC]
    if not callable(getattr(given, "is_due", None)):
        raise InvalidSpec(f"it has no is_due; its type is {type(given).__name__}")
    kind, shown = type(given).__name__, " ".join(_ADDRESS.sub("", repr(given)).split())
    return None, f"@{kind} {shown}"[:LONGEST_SPEC], str(getattr(given.app, "timezone", "UTC"))[:LONGEST_SPEC]


def _name_of(zone: Any) -> str | None:
    """The IANA name; None: it has none, as the zone of the machine."""
    if zone is timezone.utc:
        return "UTC"
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)
    try:
        cron.parse("* * * * *", str(name))
    except InvalidSpec:
        return None
    return str(name)


@contextmanager
def _clock_of(given: Any, now: datetime) -> Iterator[None]:
    """Its clock is the database's until the block ends, unless it brought one of its own."""
    if getattr(given, "nowfun", None) is not None:
        yield
        return
    given.nowfun = lambda: now
    try:
        yield
    finally:
        given.nowfun = None


# -- what it sends -----------------------------------------------------------------------------------------------------


def _fingerprint(args: Any, kwargs: Any, options: Mapping[str, Any]) -> bytes:
    """Equal for what the same code says, in every process."""
    return hashlib.sha256(repr(_plain((args or (), kwargs or {}, options))).encode()).digest()


def _plain(value: Any) -> Any:
    """As something whose repr has no addresses and no order of its own."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, datetime, timedelta)):
        return value
    if isinstance(value, Mapping):
        return "map", sorted(((repr(_plain(k)), _plain(v)) for k, v in value.items()), key=lambda pair: pair[0])
    if isinstance(value, (list, tuple)):
        return "list", [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return "set", sorted(repr(_plain(item)) for item in value)
    if isinstance(value, BeatLazyFunc):
        return "lazy", _plain(value._func), _plain(value._func_params)
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return getattr(value, "__module__", None), name
    return type(value).__module__, type(value).__qualname__, _ADDRESS.sub("", repr(value))
