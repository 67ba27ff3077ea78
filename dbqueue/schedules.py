"""Schedules: a row with a cursor, and the jobs of its slots. Verbs on the caller's session, which never commit.

A slot is an instant at which a spec is due (``cron``). The cursor, ``last_slot``, says up to where slots are dealt with. Whoever
fires locks the row, writes the jobs of the slots after the cursor, and moves the cursor, all in one transaction: any number of
beats may do that at once, a slot has one job, and a process that dies has done all of it or nothing (D16, A4). The next slot
follows from the cursor, never from how long a process has lived nor from its own clock (H14).

The row is the truth, and it may be changed by plain SQL: ``planned`` remembers for which spec ``next_at`` was told. A paused
schedule's cursor moves on, so that what was paused is not made up for later.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from dbqueue import cron, ids
from dbqueue.clock import SECOND, to_datetime
from dbqueue.database.dialect import Dialect, Session
from dbqueue.database.postgres import as_text
from dbqueue.database.tables import BEST_PRIORITY, Move, NewJob
from dbqueue.errors import DatabaseBusy, InvalidArgument, InvalidSpec, ScheduleConflict, ScheduleNotFound
from dbqueue.payload import MAX_PAYLOAD_BYTES
from dbqueue.settings import describe
from dbqueue.states import OnCrash

OWN = ""
"""The owner of the schedules that hold themselves what they enqueue."""
CATCH_UP = ("all", "latest", "skip")
MAX_AGE = 3650 * 86_400
"""Ten years, in seconds."""
ON_TIME = 60 * SECOND
"""A slot that is older was missed, for the policy "skip"."""
SET_ASIDE = 60 * SECOND
"""After this time a schedule is tried again that could not be fired. What was wrong may be cured elsewhere: time zones that were
missing on one machine, a column, a trigger."""
CRON_SLOTS, EVERY_SLOTS = 256, 64
"""Slots that one round fires at most. What is left of a cron spec comes in the next round; an interval skips it (D16, A3)."""
ROUND_BYTES = 16 * MAX_PAYLOAD_BYTES
"""Of payloads, in one round of one schedule."""

_MINUTE = 60 * SECOND
_JOB_IDS = uuid.UUID("7d1c9e0a-3b52-5f6e-9f0d-6a5d2f3b8c41")

_TEXTS = ("owner", "name", "spec", "timezone", "catch_up", "digest", "target", "queue", "key", "planned", "error")
_COLUMNS = (
    "owner", "name", "spec", "timezone", "catch_up", "max_age", "paused", "retired", "static", "digest", "target", "queue", "payload",
    "fingerprint", "key", "priority", "max_attempts", "timeout_ms", "on_crash", "anchor", "last_slot", "next_at", "planned", "fired",
    "fired_at", "error", "created_at", "updated_at",
)  # fmt: skip
SHOWN = tuple(name for name in _COLUMNS if name not in ("payload", "fingerprint"))
"""What whoever only looks needs to read."""
_DEFINITION = _COLUMNS[2:6] + _COLUMNS[8:19]
"""What whoever declares a schedule says about it; the rest is its state."""


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is declared. Those of another owner than OWN have no job in them."""

    owner: str = OWN
    name: str
    spec: str
    timezone: str = "UTC"
    catch_up: str = "all"
    max_age: int | None = None
    static: bool = False
    target: str | None = None
    queue: str | None = None
    payload: bytes | None = None
    fingerprint: bytes | None = None
    key: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    timeout_ms: int | None = None
    on_crash: int | None = None

    @property
    def digest(self) -> str:
        """Equal for equal definitions (D16). ``static`` is a part: who declares it in code says more than who wrote a row."""
        parts = [getattr(self, name) for name in self.__struct_fields__]
        return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()[:32]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    owner: str
    name: str
    spec: str
    timezone: str
    catch_up: str
    max_age: int | None
    paused: bool
    retired: bool
    static: bool
    digest: str
    target: str | None
    queue: str | None
    payload: bytes | None
    fingerprint: bytes | None
    key: str | None
    priority: int | None
    max_attempts: int | None
    timeout_ms: int | None
    on_crash: int | None
    anchor: int
    last_slot: int
    next_at: int | None
    planned: str | None
    fired: int
    fired_at: int | None
    error: str | None
    created_at: int
    updated_at: int

    @property
    def as_planned(self) -> str:
        return f"{self.spec} {self.timezone}"

    @property
    def active(self) -> bool:
        return not self.paused and not self.retired

    def parsed(self) -> cron.Spec:
        """Raises InvalidSpec: somebody may have written the row by hand."""
        return cron.parse(self.spec, self.timezone).anchored(self.anchor)

    def move(
        self, last_slot: int | None = None, next_at: int | None = None, *, fired: int = 0, error: str | None = None
    ) -> Move:
        to = self.last_slot if last_slot is None else last_slot
        return Move(self.owner, self.name, self.last_slot, to, next_at, fired, error)


@dataclass(frozen=True)
class Schedule:
    """What the database knows of one schedule. ``last_slot``: every slot up to here is dealt with. ``next_slot``: the one that comes
    next, None while it is paused or retired, or broken (``error``). ``owner`` is "" or the Celery app whose entry it is."""

    name: str
    owner: str
    spec: str
    timezone: str
    catch_up: str
    max_age: float | None
    target: str | None
    queue: str | None
    key: str | None
    priority: int | None
    max_attempts: int | None
    paused: bool
    retired: bool
    static: bool
    anchor: datetime
    last_slot: datetime
    next_slot: datetime | None
    fired: int
    fired_at: datetime | None
    error: str | None
    created_at: datetime
    updated_at: datetime

    def __repr__(self) -> str:
        return f"<Schedule {self.name} {self.spec}>"


def shown(entry: Entry) -> Schedule:
    upcoming, error = None, entry.error
    if entry.owner != OWN:
        upcoming = entry.next_at
    else:
        try:
            upcoming = entry.parsed().next_after(entry.last_slot)
        except InvalidSpec as broken:
            error = str(broken)
    return Schedule(
        name=entry.name, owner=entry.owner, spec=entry.spec, timezone=entry.timezone, catch_up=entry.catch_up,
        max_age=None if entry.max_age is None else entry.max_age / SECOND, target=entry.target, queue=entry.queue, key=entry.key,
        priority=None if entry.priority is None else BEST_PRIORITY - entry.priority, max_attempts=entry.max_attempts,
        paused=entry.paused, retired=entry.retired, static=entry.static,
        anchor=to_datetime(entry.anchor), last_slot=to_datetime(entry.last_slot),
        next_slot=to_datetime(upcoming) if upcoming is not None and entry.active else None, fired=entry.fired,
        fired_at=None if entry.fired_at is None else to_datetime(entry.fired_at), error=error,
        created_at=to_datetime(entry.created_at), updated_at=to_datetime(entry.updated_at),
    )  # fmt: skip


def check_catch_up(name: str, catch_up: object, max_age: object) -> int | None:
    """Returns ``max_age`` in microseconds. Raises InvalidArgument."""
    if catch_up not in CATCH_UP:
        got = repr(catch_up) if isinstance(catch_up, str) else describe(catch_up)
        raise InvalidArgument(
            f"schedule {name!r}: catch_up is one of {', '.join(CATCH_UP)}; got {got[:40]}. It says what becomes of missed slots"
        )
    if max_age is None:
        return None
    if isinstance(max_age, bool) or not isinstance(max_age, (int, float)) or not 1 <= max_age <= MAX_AGE:
        raise InvalidArgument(
            f"schedule {name!r}: max_age is a number of seconds from 1 to {MAX_AGE}; got {describe(max_age)}"
        )
    return round(max_age * SECOND)


# -- the rows ----------------------------------------------------------------------------------------------------------


def put(dialect: Dialect, session: Session, new: Definition, *, replace: bool = True) -> Entry:
    """Inserts or replaces the definition; returns what is stored now. A new one begins at the database's now: nothing is replayed.
    Where the spec or its zone changes, and where it was retired, what lies before now is dealt with; else the cursor stays. The same
    definition again changes nothing (A1, D16), unless somebody wrote another spec into the row, or it was set aside: then it is as
    declared again."""
    for _ in range(10):
        write(dialect, session, new, replace=replace)
        entry = get(dialect, session, new.name, new.owner)
        if entry is not None:  # else it was there, and was removed before we looked
            return entry
    raise DatabaseBusy(f"schedule {new.name!r} was removed again and again while it was declared")


def write(dialect: Dialect, session: Session, new: Definition, *, replace: bool = True) -> None:
    """As ``put`` for who does not look at it."""
    grain = SECOND if new.spec.startswith("@") else _MINUTE
    values = {name: getattr(new, name) for name in ("owner", "name", *_DEFINITION)}
    same = "s.spec = excluded.spec AND s.timezone = excluded.timezone AND s.retired = :retired"
    replaced = ", ".join(f"{name} = excluded.{name}" for name in (*_DEFINITION, "updated_at"))
    update = (
        f"(owner, name) DO UPDATE SET {replaced}, retired = :retired, "
        f"anchor = CASE WHEN {same} THEN s.anchor ELSE excluded.anchor END, "
        f"planned = CASE WHEN {same} AND s.error IS NULL THEN s.planned END, error = NULL, "
        f"last_slot = CASE WHEN {same} OR s.last_slot > excluded.last_slot THEN s.last_slot ELSE excluded.last_slot END "
        f"WHERE s.digest <> excluded.digest OR s.error IS NOT NULL OR NOT ({same})"
    )
    session.execute(
        dialect.portable(
            f"INSERT INTO {{schedules}} AS s ({', '.join(values)}, anchor, last_slot, created_at, updated_at) "
            f"SELECT {', '.join(':' + name for name in values)}, now / :grain * :grain, now / :grain * :grain, now, now "
            "FROM (SELECT {now} AS now) t WHERE 1 = 1 "
            f"ON CONFLICT {update if replace else 'DO NOTHING'}"
        ),
        {**values, "grain": grain, "retired": False, "offset": dialect.clock.offset},
    )


def remove(dialect: Dialect, session: Session, name: str, owner: str = OWN) -> bool:
    """False: there is none (A2). Jobs that it enqueued stay."""
    session.execute(
        dialect.portable("DELETE FROM {schedules} WHERE owner = :owner AND name = :name"),
        {"owner": owner, "name": name},
    )
    return session.changed == 1


def get(dialect: Dialect, session: Session, name: str, owner: str = OWN, *, with_payload: bool = False) -> Entry | None:
    where = "owner = :owner AND name = :name"
    found = _select(dialect, session, where, {"owner": owner, "name": name}, with_payload=with_payload)
    return found[0] if found else None


def find(dialect: Dialect, session: Session, owner: str | None = None) -> list[Entry]:
    """Without payloads, as ``get``."""
    if owner is None:
        return _select(dialect, session, "1 = 1 ORDER BY owner, name", {}, with_payload=False)
    return _select(dialect, session, "owner = :owner ORDER BY name", {"owner": owner}, with_payload=False)


def pause(dialect: Dialect, session: Session, name: str, owner: str = OWN) -> None:
    """Its slots pass by from here on. Raises ScheduleNotFound."""
    _change(dialect, session, name, owner, "paused = :yes", yes=True)


def resume(dialect: Dialect, session: Session, name: str, owner: str = OWN) -> None:
    """Fires again, beginning with the first slot after now. Raises ScheduleNotFound."""
    _change(
        dialect, session, name, owner,
        "paused = :no, planned = NULL, error = NULL, last_slot = CASE WHEN last_slot > {now} THEN last_slot ELSE {now} END", no=False,
    )  # fmt: skip


def reset(dialect: Dialect, session: Session, name: str, owner: str = OWN) -> None:
    """Begins anew at the database's now, even if the cursor lies behind it: the way out after the clock was wrong. Slots between
    now and where the cursor was may be fired a second time. Raises ScheduleNotFound."""
    _change(dialect, session, name, owner, "planned = NULL, error = NULL, last_slot = {now}")


def retire(dialect: Dialect, session: Session, name: str, owner: str) -> None:
    """It left the code that declared it: nobody looks at it again before ``put`` brings it back."""
    _change(
        dialect, session, name, owner,
        "retired = :yes, next_at = NULL, error = NULL, planned = spec || ' ' || timezone", yes=True,
    )  # fmt: skip


def _change(dialect: Dialect, session: Session, name: str, owner: str, what: str, **values: object) -> None:
    session.execute(
        dialect.portable(
            f"UPDATE {{schedules}} SET {what}, updated_at = {{now}} WHERE owner = :owner AND name = :name"
        ),
        {"owner": owner, "name": name, "offset": dialect.clock.offset, **values},
    )
    if session.changed == 0:
        raise ScheduleNotFound(
            f"there is no schedule {name!r}{f' of {owner}' if owner else ''}; `dbqueue schedules list` shows all"
        )


def in_order(declared: Sequence[Definition]) -> list[Definition]:
    """As whoever writes several of them in one transaction has to: two that do it in opposite orders would wait for each other."""
    return sorted(declared, key=lambda definition: (definition.owner, definition.name))


def start(dialect: Dialect, session: Session, declared: Sequence[Definition]) -> list[str]:
    """At the start of a program that declares these: writes those that are missing, and returns the names of static ones that are
    stored and not among them. Raises ScheduleConflict if another version owns one of them (D16): the caller rolls back."""
    declared = in_order(declared)
    entries = [put(dialect, session, definition, replace=False) for definition in declared]
    others = [
        entry.name for entry, declaration in zip(entries, declared, strict=True) if entry.digest != declaration.digest
    ]
    if others:
        raise ScheduleConflict(
            f"the code declares {', '.join(map(repr, others[:5]))}{' and others' if len(others) > 5 else ''} in another version than the "
            "one that is stored: two versions would fight over the cursor. Start the other version, or put this one in its place: "
            "`dbqueue schedules adopt -A ...`"
        )
    names = {entry.name for entry in entries}
    return [entry.name for entry in find(dialect, session, OWN) if entry.static and entry.name not in names]


# -- rounds ------------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What an idle beat asks about one owner's schedules."""

    next_at: int | None
    unplanned: bool


def look(dialect: Dialect, session: Session, owners: Sequence[str]) -> tuple[int, list[Look]]:
    """The database's now, and of each owner when its next schedule is due. Reads two index entries of each."""
    columns, params = ["{now}"], {"offset": dialect.clock.offset}
    for n, owner in enumerate(owners):
        params[f"o{n}"] = owner  # type: ignore[assignment]
        columns += [
            f"(SELECT min(next_at) FROM {{schedules}} WHERE owner = :o{n} AND next_at IS NOT NULL)",
            f"(SELECT 1 FROM {{schedules}} WHERE owner = :o{n} AND (planned IS NULL OR planned <> spec || ' ' || timezone) "
            "ORDER BY updated_at LIMIT 1)",
        ]
    row = session.execute(dialect.portable(f"SELECT {', '.join(columns)}"), params)[0]
    looks = [Look(row[1 + 2 * n], row[2 + 2 * n] is not None) for n in range(len(owners))]
    return int(row[0]), looks


def due(dialect: Dialect, session: Session, owner: str, now: int, limit: int) -> list[Entry]:
    """Locks and returns schedules whose time has come, the longest due first; those that another beat holds are left to it. One whose
    spec was changed meanwhile is planned first: its next time was told from the old one."""
    where = "owner = :owner AND next_at <= :now ORDER BY next_at LIMIT {limit} {skip_locked}"
    found = _select(dialect, session, where.replace("{limit}", str(limit)), {"owner": owner, "now": now})
    return [entry for entry in found if entry.planned == entry.as_planned]  # as a condition it would spoil the plan


def unplanned(dialect: Dialect, session: Session, owner: str, limit: int) -> list[Entry]:
    """Locks and returns schedules that are new, or were changed since their next time was told."""
    where = (
        "owner = :owner AND (planned IS NULL OR planned <> spec || ' ' || timezone) "
        "ORDER BY updated_at LIMIT {limit} {skip_locked}"
    )
    return _select(dialect, session, where.replace("{limit}", str(limit)), {"owner": owner})


def ahead(dialect: Dialect, session: Session, owners: Sequence[str], now: int) -> list[str]:
    """Names of active schedules whose cursor lies more than a minute after the database's now: the clock went back, and until it has
    caught up they are silent."""
    names: list[str] = []
    for owner in owners:
        rows = session.execute(
            dialect.portable(
                "SELECT name FROM {schedules} WHERE owner = :owner AND last_slot > :late AND paused = :no AND retired = :no "
                "ORDER BY name LIMIT 20"
            ),
            {"owner": owner, "late": now + _MINUTE, "no": False},
        )
        names += [as_text(row[0]) for row in rows]
    return names


class Round(NamedTuple):
    slots: list[int]
    last_slot: int
    next_at: int | None


def next_round(
    spec: cron.Spec,
    last_slot: int,
    now: int,
    *,
    catch_up: str = "all",
    max_age: int | None = None,
    limit: int = CRON_SLOTS,
) -> Round:
    """Which slots after the cursor are to be fired now, and where the cursor goes. Pure arithmetic."""
    if last_slot >= now:
        return Round([], last_slot, spec.next_after(last_slot))
    if catch_up == "skip":  # what is not late is no catching up
        max_age = ON_TIME if max_age is None else min(max_age, ON_TIME)
    since = last_slot if max_age is None else max(last_slot, now - max_age - 1)
    if catch_up != "latest":
        most = EVERY_SLOTS if isinstance(spec, cron.Every) else max(1, min(limit, CRON_SLOTS))
        slots = spec.slots(since, now, most)
        if len(slots) == most and not isinstance(spec, cron.Every):
            return Round(slots, slots[-1], spec.next_after(slots[-1]))
    else:
        slot = spec.latest(since, now)
        slots = [] if slot is None else [slot]
    latest = spec.latest(last_slot, now)
    to = last_slot if latest is None else latest
    return Round(slots, to, spec.next_after(to))


def plan(entry: Entry, now: int) -> Move:
    """When to look at a schedule whose spec is new. If somebody changed it in the table, what lies before now is dealt with."""
    last_slot = entry.last_slot if entry.planned is None else max(entry.last_slot, now)
    try:
        return entry.move(last_slot, entry.parsed().next_after(last_slot))
    except InvalidSpec as broken:
        return entry.move(last_slot, now + SET_ASIDE, error=str(broken))


def fire(entry: Entry, now: int) -> tuple[Move, list[NewJob]]:
    """The jobs of a due schedule of OWN, and where its cursor goes. A row that cannot be fired is set aside with its error: its
    cursor stays, and it is tried again after a while."""
    try:
        check_catch_up(entry.name, entry.catch_up, None)
        spec = entry.parsed()
        size = max(1, len(entry.payload or b""))
        slots, last_slot, next_at = next_round(
            spec, entry.last_slot, now, catch_up=entry.catch_up, max_age=entry.max_age, limit=ROUND_BYTES // size
        )
        jobs = [new_job(entry, slot_id(entry.owner, entry.name, slot), slot) for slot in slots] if entry.active else []
    except (InvalidSpec, InvalidArgument) as broken:
        return entry.move(next_at=now + SET_ASIDE, error=str(broken)), []
    return entry.move(last_slot, next_at, fired=len(jobs)), jobs


def new_job(entry: Entry, job_id: bytes, slot: int | None = None) -> NewJob:
    """One job of a schedule of OWN; ``source`` and ``sequence`` of its record say which schedule and slot it is of. Raises
    InvalidArgument for a row that lacks what a job needs."""
    values: Mapping[str, Any] = {
        name: getattr(entry, name) for name in ("target", "queue", "payload", "priority", "max_attempts")
    }
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise InvalidArgument(f"the row has no {' and no '.join(missing)}: write the schedule with queue.schedule(...)")
    if entry.on_crash is not None and entry.on_crash not in (known := [int(choice) for choice in OnCrash]):
        raise InvalidArgument(f"the row's on_crash is none of {known}: write the schedule with queue.schedule(...)")
    return NewJob(
        id=job_id, **values, key=entry.key, fingerprint=entry.fingerprint, timeout_ms=entry.timeout_ms,
        on_crash=OnCrash(entry.on_crash or OnCrash.RETRY), source=entry.name, sequence=slot,
    )  # fmt: skip


def slot_id(owner: str, name: str, slot: int) -> bytes:
    """The job's id, a function of schedule and slot (D16): whoever fires it, and however often it is tried."""
    return uuid.uuid5(_JOB_IDS, f"{owner}\0{name}\0{slot}").bytes


def run_now(dialect: Dialect, session: Session, name: str) -> NewJob:
    """A job of the schedule beside its slots, to be written by the caller; the cursor stays. Raises ScheduleNotFound, InvalidArgument."""
    entry = get(dialect, session, name, with_payload=True)
    if entry is None:
        raise ScheduleNotFound(f"there is no schedule {name!r}; `dbqueue schedules list` shows all")
    return new_job(entry, ids.new_id())


# -- reading -----------------------------------------------------------------------------------------------------------


def _select(
    dialect: Dialect, session: Session, where: str, params: dict[str, Any], *, with_payload: bool = True
) -> list[Entry]:
    columns = _COLUMNS if with_payload else SHOWN
    rows = session.execute(dialect.portable(f"SELECT {', '.join(columns)} FROM {{schedules}} WHERE {where}"), params)
    return [_entry(columns, row) for row in rows]


def _entry(columns: Sequence[str], row: Sequence[Any]) -> Entry:
    values: dict[str, Any] = {"payload": None, "fingerprint": None} | dict(zip(columns, row, strict=True))
    for name in _TEXTS:
        values[name] = None if values[name] is None else as_text(values[name])
    for name in ("paused", "retired", "static"):
        values[name] = bool(values[name])
    for name in ("payload", "fingerprint"):
        values[name] = None if values[name] is None else bytes(values[name])
    return Entry(**values)
