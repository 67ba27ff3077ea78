"""``dbqueue jobs``: look at jobs, and decide about single ones by hand.

Verbs that take several ids go on after one is refused; what was done is printed even if the database goes away in the
middle. None of them is undone by a later error: each is a transaction of its own.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from dbqueue import clock
from dbqueue.cli.options import Asked, confirmed, database_options, duration, instant, yes_option
from dbqueue.cli.output import Column, age, as_json, document, iso, report, table, visible, words
from dbqueue.errors import IllegalMove, JobNotFound
from dbqueue.queue import DBQueue
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
    """Show everything about one job.

    \b
    dbqueue jobs show 01987a5e-8f7b-7c3e-9d45-2b1f0e6a7c88 --payload -A shop.jobs
    """
    with asked.existing() as queue:
        record = _read(queue, job_id, with_payload)
    if asked.as_json:
        document(as_json(record) | (_payload(record) if with_payload else {}))
        return
    click.echo(_described(record))
    if with_payload:
        click.echo(_payload_text(record))


def _read(queue: DBQueue, job_id: UUID, with_payload: bool = False) -> JobRecord:
    record = queue.get_job(job_id, with_payload=with_payload)
    if record is None:
        raise JobNotFound(f"there is no job {job_id}, or its history was pruned")
    return record


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
        return {"payload": json.loads(record.payload.decode("utf-8"), parse_constant=_refuse_constant)}
    except (ValueError, RecursionError):
        return {"payload_hex": record.payload.hex()}


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _payload_text(record: JobRecord) -> str:
    if record.payload is None:
        return "payload        (not kept)"
    shown = _payload(record)
    if "payload" in shown:
        # Texts may hold any character: those a terminal would obey are escaped, the newlines between values are not.
        pretty = json.dumps(shown["payload"], indent=2, ensure_ascii=False)
        return "payload\n" + "\n".join(visible(line) for line in pretty.split("\n"))
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
    results: list[dict[str, Any]] = []
    try:
        for job_id in job_ids:
            try:
                results.append({"id": str(job_id), "state": state, "was": verb(job_id)})
            except (JobNotFound, IllegalMove) as refused:
                report(refused.code, str(refused), as_json=asked.as_json)
                results.append({"id": str(job_id), "error": str(refused.code), "message": str(refused)})
    finally:
        _print_results(asked, results)
    return 1 if any("error" in result for result in results) else 0


def _print_results(asked: Asked, results: list[dict[str, Any]]) -> None:
    if asked.as_json:
        document({"results": results})
    elif done := [f"{r['id']} is {r['state']} (was {r['was']})" for r in results if "error" not in r]:
        click.echo("\n".join(done))


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
