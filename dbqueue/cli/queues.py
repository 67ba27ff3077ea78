"""``dbqueue queues``: what is waiting, and for how long; for people, monitors and autoscalers."""

from __future__ import annotations

import click

from dbqueue.cli.options import Asked, database_options
from dbqueue.cli.output import Column, age, as_json, document, table, words
from dbqueue.views import QueueDepth

_COUNTS = ("ready", "waiting", "running", "blocked", "unknown")
METRICS = (*_COUNTS, "backlog", "oldest_age")


@click.command()
@click.option("--queue", "name", metavar="NAME", help="Only this queue, and even if it has no jobs.")
@click.option(
    "--metric", type=click.Choice(METRICS),
    help="Print this number only: of --queue, or of all queues together. backlog is ready and running.",
)  # fmt: skip
@database_options
def queues(asked: Asked, name: str | None, metric: str | None) -> None:
    """Show every queue with unfinished jobs.

    READY can be claimed now, WAITING has a later time. OLDEST is how long the oldest ready job has waited.

    One statement that reads every unfinished job: some 50 ms for 100,000 of them. So ask every 15 seconds, not every
    second.

    \b
    dbqueue queues -A shop.jobs
    dbqueue queues --queue mail --metric backlog
    dbqueue queues --json | jq '.queues[] | select(.oldest_age > 60)'
    """
    if metric is not None and asked.as_json:
        raise click.UsageError("--metric prints a number; leave --json out")
    with asked.existing() as queue:
        found = queue.queues(name)
    if name is not None and not found:
        found = [QueueDepth(name, 0, 0, 0, 0, 0, None)]
    if metric is not None:
        click.echo(_number(found, metric))
    elif asked.as_json:
        document({"queues": [as_json(depth) for depth in found]})
    elif found:
        columns = [Column("QUEUE", shrinks=True), *(Column(count.upper(), right=True) for count in _COUNTS)]
        rows = [[d.queue, *(getattr(d, count) for count in _COUNTS), age(d.oldest_age)] for d in found]
        table([*columns, Column("OLDEST", right=True)], rows)
    else:
        words("No unfinished jobs.")


def _number(found: list[QueueDepth], metric: str) -> str:
    """Whole numbers and seconds with three places: what every autoscaler can read."""
    if metric == "oldest_age":
        return f"{max((depth.oldest_age or 0.0 for depth in found), default=0.0):.3f}"
    if metric == "backlog":
        return str(sum(depth.ready + depth.running for depth in found))
    return str(sum(getattr(depth, metric) for depth in found))
