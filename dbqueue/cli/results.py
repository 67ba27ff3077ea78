"""``dbqueue results``: look at the results of Celery tasks that dbqueue keeps."""

from __future__ import annotations

import click

from dbqueue import results as stored_results
from dbqueue.cli.jobs import stored
from dbqueue.cli.options import Asked, database_options
from dbqueue.cli.output import decoded, document, pretty, visible
from dbqueue.errors import JobNotFound


@click.group()
def results() -> None:
    """Look at the results of Celery tasks."""


@results.command()
@click.argument("task_id", metavar="ID")
@click.option(
    "--with-result", is_flag=True, help="Show what was stored too, if it is JSON: value or error, traceback, children."
)
@database_options
def show(asked: Asked, task_id: str, with_result: bool) -> None:
    """Show the result of one task: its state, when it was stored, until when it is kept, and its size in bytes.

    \b
    dbqueue results show 5f0a9d3c-6f0e-4b59-8d0b-1c1f8c1f7a10 --with-result -A shop.jobs
    """
    with asked.existing() as queue:
        database = queue.database
        found = database.read(
            lambda session: stored_results.describe(
                database.dialect, session, task_id, with_size=True, with_meta=with_result
            )
        )
    if found is None:
        raise JobNotFound(f"there is no result of task {visible(task_id)!r}, or it has expired")
    shown: dict[str, object] = {"task_id": task_id, **stored(found), "size": found.size}
    told = {}
    if found.meta is not None:
        try:
            told = {"stored": decoded(found.meta)}
        except ValueError:
            told = {"stored": None}
    if asked.as_json:
        document(shown | told)
        return
    for name, value in shown.items():
        if value is not None:
            click.echo(f"{name:<15}{visible(str(value))}{' bytes' if name == 'size' else ''}")
    if with_result and told["stored"] is None:
        click.echo("stored         (no JSON)")
    elif with_result:
        click.echo("stored\n" + pretty(told["stored"]))
