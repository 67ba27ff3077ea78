"""``dbqueue schedules``: look at them, and what is done to them by hand."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import click

from dbqueue import cron
from dbqueue.cli import apps
from dbqueue.cli.options import Asked, confirmed, database_options, yes_option
from dbqueue.cli.output import Column, as_json, document, iso, table, visible, words
from dbqueue.clock import to_datetime, to_instant
from dbqueue.errors import NotSupported, ScheduleNotFound
from dbqueue.queue import DBQueue
from dbqueue.schedules import OWN, Schedule

OF_CELERY = "it is an entry of a Celery app, and only that app can make its message: name the app with -A"

owner_option = click.option("--owner", default=OWN, metavar="APP", help="Of this Celery app's entries.")


@click.group()
def schedules() -> None:
    """Schedules: rows of the database that `dbqueue beat` fires."""


def _state(schedule: Schedule) -> str:
    if schedule.retired:
        return "retired"
    return "paused" if schedule.paused else "broken" if schedule.error else "active"


def _found(queue: DBQueue, name: str, owner: str) -> Schedule:
    schedule = queue.get_schedule(name, owner)
    if schedule is None:
        raise ScheduleNotFound(f"there is no schedule {name!r}{f' of {owner}' if owner else ''}")
    return schedule


def _zoned(when: datetime | None, timezone: str) -> str | None:
    """The instant on the wall clock of the schedule's zone; None in UTC, where it would only be said twice."""
    if when is None or timezone == "UTC":
        return None
    with suppress(Exception):  # somebody wrote the row by hand
        return when.astimezone(ZoneInfo(timezone)).isoformat(timespec="seconds")
    return None


def _brief(when: datetime | None) -> str | None:
    return None if when is None else iso(when)[:19] + "Z"


@schedules.command("list")
@database_options
def list_(asked: Asked) -> None:
    """Show all schedules, with the next time of each in UTC.

    \b
    dbqueue schedules list -A shop.jobs
    """
    with asked.existing() as queue:
        found = queue.schedules()
    if asked.as_json:
        document({"schedules": [_json(schedule) for schedule in found]})
    elif found:
        columns = [
            Column("NAME", shrinks=True), Column("OWNER", shrinks=True), Column("SPEC", shrinks=True), Column("ZONE"),
            Column("STATE"), Column("NEXT"), Column("FIRED", right=True),
        ]  # fmt: skip
        table(columns, [
            [s.name, s.owner or None, s.spec, s.timezone, _state(s), _brief(s.next_slot), s.fired] for s in found
        ])  # fmt: skip
    else:
        words("No schedules.")


def _json(schedule: Schedule) -> dict[str, Any]:
    return {
        **as_json(schedule), "state": _state(schedule),
        "next_slot_in_zone": _zoned(schedule.next_slot, schedule.timezone),
    }  # fmt: skip


@schedules.command()
@click.argument("name")
@owner_option
@database_options
def show(asked: Asked, name: str, owner: str) -> None:
    """Show one schedule, without its payload."""
    with asked.existing() as queue:
        schedule = _found(queue, name, owner)
    if asked.as_json:
        document(_json(schedule))
        return
    for field, value in _json(schedule).items():
        if value not in (None, ""):
            click.echo(f"{field + ':':<18} {visible(str(value))}")


@schedules.command()
@click.argument("name")
@click.option("-n", "--count", type=click.IntRange(1, 1_000), default=10, show_default=True)
@owner_option
@database_options
def next(asked: Asked, name: str, count: int, owner: str) -> None:
    """Show when a schedule is due next: in UTC, and on the wall clock of its zone."""
    with asked.existing() as queue:
        schedule = _found(queue, name, owner)
    if owner != OWN:
        times = [] if schedule.next_slot is None else [schedule.next_slot]
    else:
        spec = cron.parse(schedule.spec, schedule.timezone).anchored(to_instant(schedule.anchor))
        times, at = [], to_instant(schedule.last_slot)
        while len(times) < count and (upcoming := spec.next_after(at)) is not None:
            times.append(to_datetime(upcoming))
            at = upcoming
    if asked.as_json:
        document({
            "name": name, "timezone": schedule.timezone,
            "next": [{"utc": iso(t), "in_zone": _zoned(t, schedule.timezone)} for t in times],
        })  # fmt: skip
        return
    for time in times:
        zoned = _zoned(time, schedule.timezone)
        click.echo(_brief(time) if zoned is None else f"{_brief(time)}  {zoned}")


@schedules.command()
@click.argument("name")
@owner_option
@database_options
def pause(asked: Asked, name: str, owner: str) -> None:
    """Let a schedule's slots pass by. What is paused is not made up for."""
    with asked.existing() as queue:
        queue.pause_schedule(name, owner)
    _said(asked, name, "paused")


@schedules.command()
@click.argument("name")
@owner_option
@database_options
def resume(asked: Asked, name: str, owner: str) -> None:
    """Fire a paused schedule again, beginning with its next slot."""
    with asked.existing() as queue:
        queue.resume_schedule(name, owner)
    _said(asked, name, "resumed")


@schedules.command()
@click.argument("name")
@owner_option
@yes_option
@database_options
def reset(asked: Asked, name: str, owner: str, yes: bool) -> None:
    """Begin a schedule anew at the database's now.

    The way out after the database's clock was wrong and the cursor lies in the future. Slots between now and the cursor
    may be fired a second time.
    """
    with asked.existing() as queue:
        schedule = _found(queue, name, owner)
        question = f"Begin {visible(name)} anew? Every slot up to {_brief(schedule.last_slot)} was dealt with."
        if confirmed(question, yes):
            queue.reset_schedule(name, owner)
            _said(asked, name, "reset")


@schedules.command()
@click.argument("name")
@owner_option
@yes_option
@database_options
def remove(asked: Asked, name: str, owner: str, yes: bool) -> None:
    """Remove a schedule. Its jobs stay."""
    with asked.existing() as queue:
        _found(queue, name, owner)
        if confirmed(f"Remove the schedule {visible(name)}?", yes):
            queue.unschedule(name, owner)
            _said(asked, name, "removed")


@schedules.command("run-now")
@click.argument("name")
@owner_option
@database_options
def run_now(asked: Asked, name: str, owner: str) -> None:
    """Enqueue a job of a schedule now, beside its slots.

    An entry of a Celery app is sent by the app: name it with --owner and -A.
    """
    if owner != OWN:
        _run_entry(asked, name, owner)
        return
    with asked.existing() as queue:
        job = queue.run_schedule(name)
    if asked.as_json:
        document({"name": name, "id": str(job.id), "duplicate": job.duplicate})
    elif job.duplicate:
        words(f"An unfinished job has its key already: {job.id}")
    else:
        click.echo(job.id)


def _run_entry(asked: Asked, name: str, owner: str) -> None:
    celery = None if asked.app is None else apps.find_celery(asked.app)
    if celery is None:
        raise NotSupported(f"{name!r} cannot be run from here: {OF_CELERY}")
    from dbqueue.celery_beat.scheduler import source_of

    source = source_of(celery)
    if source.owner != owner:
        raise NotSupported(f"{name!r} cannot be run from here: the Celery app of -A is {source.owner}, not {owner}")
    task_id = source.run_now(name)
    if asked.as_json:
        document({"name": name, "id": task_id})
    else:
        click.echo(task_id)


@schedules.command()
@database_options
def adopt(asked: Asked) -> None:
    """Put the schedules that the module of -A declares in the place of another version's.

    Their cursors stay, so no slot is lost and none is fired twice; where the spec is another one, the new one begins now.
    """
    with asked.existing() as queue:
        adopted = queue.adopt_schedules()
    if asked.as_json:
        document({"schedules": [_json(schedule) for schedule in adopted]})
    elif adopted:
        click.echo("\n".join(visible(schedule.name) for schedule in adopted))
    else:
        words("The code declares no schedules.")


def _said(asked: Asked, name: str, what: str) -> None:
    if asked.as_json:
        document({"name": name, "done": what})
    else:
        words(f"{visible(name)}: {what}.")
