"""``dbqueue queues``: what is waiting, and for how long."""

from __future__ import annotations

import click

from dbqueue.cli.options import Asked, database_options
from dbqueue.cli.output import Column, age, as_json, document, table, words

_COUNTS = ("ready", "waiting", "running", "blocked", "unknown")


@click.command()
@database_options
def queues(asked: Asked) -> None:
    """Show every queue with unfinished jobs.

    READY can be claimed now, WAITING has a later time. OLDEST is how long the oldest ready job has waited.

    \b
    dbqueue queues -A shop.jobs
    dbqueue queues --json | jq '.queues[] | select(.oldest_age > 60)'
    """
    with asked.existing() as queue:
        found = queue.queues()
    if asked.as_json:
        document({"queues": [as_json(depth) for depth in found]})
    elif found:
        columns = [Column("QUEUE", shrinks=True), *(Column(name.upper(), right=True) for name in _COUNTS)]
        rows = [[d.queue, *(getattr(d, name) for name in _COUNTS), age(d.oldest_age)] for d in found]
        table([*columns, Column("OLDEST", right=True)], rows)
    else:
        words("No unfinished jobs.")
