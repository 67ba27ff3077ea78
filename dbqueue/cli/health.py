"""``dbqueue health``: is the worker alive that writes this file? Asks neither the database nor the worker.

A supervisor asks every few seconds, so this command has a short way in (``quick``) that loads nothing of the other
commands.
"""

from __future__ import annotations

import click

from dbqueue.cli.output import WIDTH, visible
from dbqueue.runtime.health import pulse


@click.command()
@click.argument("path", metavar="PATH", type=click.Path())
@click.option(
    "--max-age", type=click.FloatRange(1, 86_400), default=15.0, show_default=True, metavar="SECONDS",
    help="How old its last sign of life may be.",
)  # fmt: skip
def health(path: str, max_age: float) -> int:
    """Tell whether a worker is alive: exit code 0 or 1.

    PATH is what the worker was given as --health-file. The worker renews it every second while its loop comes round and
    its database answers, and removes it when it ends.

    \b
    dbqueue worker -A shop.jobs --health-file /tmp/worker.json
    dbqueue health /tmp/worker.json --max-age 15
    """
    found = pulse(path, max_age)
    click.echo(visible(found.sentence), err=not found.alive)
    return 0 if found.alive else 1


def quick(arguments: list[str]) -> int | None:
    """The exit code; None: something is wrong with the arguments, and the whole program is to say what."""
    try:
        code = health.main(
            arguments,
            "dbqueue health",
            standalone_mode=False,
            help_option_names=["-h", "--help"],
            max_content_width=WIDTH,
        )
    except (click.ClickException, click.Abort):
        return None
    return int(code)
