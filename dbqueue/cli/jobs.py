"""``dbqueue jobs``: look at jobs, and decide about single ones by hand.

Verbs that take several ids go on after one is refused; what was done is printed even if the database goes away in the
middle. None of them is undone by a later error: each is a transaction of its own.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from dbqueue import clock, results, views
from dbqueue.cli.options import Asked, confirmed, database_options, duration, instant, yes_option
from dbqueue.cli.output import Column, age, as_json, decoded, document, iso, pretty, report, table, visible, words
from dbqueue.errors import DatabaseError, IllegalMove, JobNotFound
from dbqueue.queue import DBQueue
from dbqueue.results import StoredRecord
from dbqueue.states import State
from dbqueue.views import JobRecord

BATCH = 1_000
"""Rows that one transaction of purge deletes: some ten milliseconds, so that nobody waits for it."""
PROGRESS_EVERY_S = 2.0


@click.group()
def jobs() -> None:
    """Look at jobs, retry, cancel, resolve and purge them."""


# -- looking -----------------------------------------------------------------------------------------------------------


@jobs.command("list")
@click.option("--state", type=click.Choice([state.label for state in State]), help="Only jobs in this state.")
@click.option("--queue", "queue_name", metavar="NAME", help="Only jobs of this queue.")
@click.option("--target", metavar="NAME", help="Only jobs of this target.")
@click.option("--key", metavar="KEY", help="Only jobs with this key.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="At most so many.")
@database_options
def list_jobs(
    asked: Asked, state: str | None, queue_name: str | None, target: str | None, key: str | None, limit: int
) -> None:
    """List jobs, those changed last first. CHANGED is how long ago.

    \b
    dbqueue jobs list -A shop.jobs --state dead --target shop.jobs.send_receipt
    """
    with asked.existing() as queue:
        found = queue.jobs(state=state, queue=queue_name, target=target, key=key, limit=limit)
        now = clock.to_datetime(queue.database.read(queue.database.dialect.now))
    if asked.as_json:
        document({"jobs": [as_json(record) for record in found]})
    elif found:
        columns = [Column(title) for title in ("ID", "STATE", "TRIES")]
        columns += [Column("CHANGED", right=True), Column("QUEUE", shrinks=True), Column("TARGET", shrinks=True)]
        table(columns, [_row(record, now) for record in found])
        if len(found) == limit:
            words(f"The first {limit}; --limit shows more.")
    else:
        words("No such jobs.")


def _row(record: JobRecord, now: datetime) -> list[object]:
    tries = f"{record.attempt}/{record.max_attempts}"
    changed = age((now - record.updated_at).total_seconds())
    return [record.id, record.state, tries, changed, record.queue, record.target]


@jobs.command()
@click.argument("job_id", metavar="ID", type=click.UUID)
@click.option(
    "--payload", "with_payload", is_flag=True, help="Show the payload too: as JSON if it is that, else in hex."
)
@database_options
def show(asked: Asked, job_id: UUID, with_payload: bool) -> None:
    """Show everything about one job; ID may be the id of a Celery task, too.

    Of a task's result, if dbqueue keeps it, the state is shown; `dbqueue results show` shows more.

    \b
    dbqueue jobs show 01987a5e-8f7b-7c3e-9d45-2b1f0e6a7c88 --payload -A shop.jobs
    """
    with asked.existing() as queue:
        record = _read(queue, job_id, with_payload, or_task=True)
        result = None if record.task_id is None else _result(queue, record.task_id)
    if asked.as_json:
        of_task = {"result": None if result is None else stored(result)}
        document(as_json(record) | of_task | (_payload(record) if with_payload else {}))
        return
    click.echo(_described(record))
    if result is not None:
        click.echo("\n".join(f"result_{name:<8}{value}" for name, value in stored(result).items() if value is not None))
    if with_payload:
        click.echo(_payload_text(record))


def _read(queue: DBQueue, job_id: UUID, with_payload: bool = False, *, or_task: bool = False) -> JobRecord:
    record = queue.get_job(job_id, with_payload=with_payload)
    if record is None and or_task:
        database = queue.database
        found = database.read(lambda s: views.find(database.dialect, s, task_id=str(job_id), limit=1))
        record = queue.get_job(found[0].id, with_payload=with_payload) if found else None
    if record is None:
        raise JobNotFound(f"there is no job {job_id}, or its history was pruned")
    return record


def _result(queue: DBQueue, task_id: str) -> StoredRecord | None:
    database = queue.database
    try:
        return database.read(lambda session: results.describe(database.dialect, session, task_id))
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) != "42501":
            raise
        return None  # who may read jobs may not always read results


def stored(result: StoredRecord) -> dict[str, object]:
    """As JSON, without what the task returned."""
    return {name: value for name, value in as_json(result).items() if name not in ("size", "meta")}


def _described(record: JobRecord) -> str:
    """One line for each field that is filled."""
    lines = []
    for field in fields(record):
        value = getattr(record, field.name)
        if value is not None and field.name != "payload":
            text = iso(value) if isinstance(value, datetime) else visible(str(value))
            lines.append(f"{field.name:<15}{text}{' s' if field.name == 'timeout' else ''}")
    return "\n".join(lines)


def _payload(record: JobRecord) -> dict[str, object]:
    """``payload`` if it is JSON, else ``payload_hex``; a payload of null if none was kept."""
    if record.payload is None:
        return {"payload": None}
    try:
        return {"payload": decoded(record.payload)}
    except ValueError:
        return {"payload_hex": record.payload.hex()}


def _payload_text(record: JobRecord) -> str:
    if record.payload is None:
        return "payload        (not kept)"
    shown = _payload(record)
    if "payload" in shown:
        return "payload\n" + pretty(shown["payload"])
    return f"payload        {len(record.payload)} bytes that are no JSON\n" + textwrap.fill(
        str(shown["payload_hex"]), 64
    )


# -- deciding ----------------------------------------------------------------------------------------------------------


@jobs.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True, type=click.UUID)
@database_options
def retry(asked: Asked, job_ids: Sequence[UUID]) -> int:
    """Make blocked, dead, cancelled or ended jobs pending again, due now.

    \b
    dbqueue jobs retry 01987a5e-8f7b-7c3e-9d45-2b1f0e6a7c88 -A shop.jobs
    """
    with asked.existing() as queue:
        return _each(asked, job_ids, queue.retry, "pending")


@jobs.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True, type=click.UUID)
@database_options
def cancel(asked: Asked, job_ids: Sequence[UUID]) -> int:
    """Cancel pending, blocked or running jobs; the result of a running one is not recorded.

    \b
    dbqueue jobs cancel 01987a5e-8f7b-7c3e-9d45-2b1f0e6a7c88 -A shop.jobs
    """
    with asked.existing() as queue:
        return _each(asked, job_ids, queue.cancel, "cancelled")


def _each(asked: Asked, job_ids: Sequence[UUID], verb: Callable[[UUID], str], state: str) -> int:
    done: list[dict[str, Any]] = []
    try:
        for job_id in job_ids:
            try:
                done.append({"id": str(job_id), "state": state, "was": verb(job_id)})
            except (JobNotFound, IllegalMove) as refused:
                report(refused.code, str(refused), as_json=asked.as_json)
                done.append({"id": str(job_id), "error": str(refused.code), "message": str(refused)})
    finally:
        _print_results(asked, done)
    return 1 if any("error" in result for result in done) else 0


def _print_results(asked: Asked, done: list[dict[str, Any]]) -> None:
    if asked.as_json:
        document({"results": done})
    elif lines := [f"{r['id']} is {r['state']} (was {r['was']})" for r in done if "error" not in r]:
        click.echo("\n".join(lines))


@jobs.command()
@click.argument("job_id", metavar="ID", type=click.UUID)
@click.argument("outcome", metavar="succeeded|discarded", type=click.Choice(["succeeded", "discarded"]))
@click.option(
    "--expected-updated-at", callback=instant, metavar="TIME", help="Only if the job still is as it was then."
)
@yes_option
@database_options
def resolve(asked: Asked, job_id: UUID, outcome: str, expected_updated_at: datetime | None, yes: bool) -> int:
    """Decide about a job whose outcome is unknown: succeeded or discarded.

    Without --expected-updated-at the job is shown first, and the decision counts only if it has not changed since.

    \b
    dbqueue jobs resolve 01987a5e-8f7b-7c3e-9d45-2b1f0e6a7c88 succeeded -A shop.jobs
    """
    with asked.existing() as queue:
        if expected_updated_at is None:
            record = _read(queue, job_id)
            if record.state == State.UNKNOWN.label:  # of any other, the verb itself says what is wrong
                words(_described(record))
                if not confirmed(f"Resolve this job as {outcome}?", yes):
                    return 1
            expected_updated_at = record.updated_at
        was = queue.resolve(job_id, outcome, expected_updated_at)
    _print_results(asked, [{"id": str(job_id), "state": outcome, "was": was}])
    return 0


@jobs.command()
@click.option(
    "--state", "states", multiple=True, required=True, help="Finished jobs of this state; may be given again.",
    type=click.Choice([state.label for state in State if state.finished]),
)  # fmt: skip
@click.option(
    "--older-than", callback=duration, required=True, metavar="AGE", help="That ended so long ago: 12h, 7d, 0s."
)
@yes_option
@database_options
def purge(asked: Asked, states: Sequence[str], older_than: float, yes: bool) -> int:
    """Delete finished jobs from the history, a thousand in a transaction.

    \b
    dbqueue jobs purge --state dead --older-than 7d -A shop.jobs
    """
    with asked.existing() as queue:
        if not yes:
            held = queue.counts()
            counted = " and ".join(f"{held.get(state, 0)} {state}" for state in states)
            if not confirmed(f"There are {counted} jobs; delete those older than {older_than:g} s?", yes):
                return 1
        deleted = 0
        try:
            for count in _batches(queue, states, older_than):
                deleted += count
        finally:  # an interrupted purge has deleted, too
            if asked.as_json:
                document({"deleted": deleted})
            else:
                click.echo(f"deleted {deleted}")
    return 0


def _batches(queue: DBQueue, states: Sequence[str], older_than: float) -> Iterator[int]:
    """Yields what each transaction deleted. The border stays where it was at the start: on a busy system there is
    always one more job that has just become old enough."""
    started = told = time.monotonic()
    total = 0
    while count := queue.purge(states, older_than + time.monotonic() - started, BATCH):
        yield count
        total += count
        if time.monotonic() - told >= PROGRESS_EVERY_S:
            told = time.monotonic()
            words(f"{total} deleted so far")
