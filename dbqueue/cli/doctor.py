"""``dbqueue doctor``: is this database fit for work, and if not, what cures it."""

from __future__ import annotations

import textwrap

import click

from dbqueue import __version__
from dbqueue.cli.distribution import check_distribution
from dbqueue.cli.options import Asked, database_options
from dbqueue.cli.output import WIDTH, document, scrub, visible
from dbqueue.doctor import PATIENCE, Finding, Status, examine
from dbqueue.doctor.privileges import ROLES
from dbqueue.errors import ForeignDistribution


@click.command()
@click.option(
    "--role", metavar="ROLE", type=click.Choice(list(ROLES)),
    help=f"What the database user is for; without it, everything. One of {', '.join(ROLES)}.",
)  # fmt: skip
@click.option(
    "--patience", type=click.FloatRange(1, 86_400), default=PATIENCE, show_default=True, metavar="SECONDS",
    help="How long a due job or an ended lease may wait.",
)  # fmt: skip
@database_options
def doctor(asked: Asked, role: str | None, patience: float) -> int:
    """Examine the database, its server and its jobs; change nothing.

    With -A, stored jobs are compared with the declared targets, too. Exit code 0: all is well, or there are warnings
    only; 1: something is broken.

    \b
    dbqueue doctor -A shop.jobs
    dbqueue doctor --json | jq '.checks[] | select(.status != "ok")'
    """
    with asked.existing() as queue:
        found = [distribution(), *examine(queue, with_targets=asked.app is not None, role=role, patience=patience)]
        label = queue.database.label
    worst = next((s for s in (Status.FAILURE, Status.WARNING) if any(f.status is s for f in found)), Status.OK)
    if asked.as_json:
        checks = [
            {"name": f.name, "status": str(f.status), "sentence": scrub(f.sentence), "remedy": f.remedy} for f in found
        ]
        document({"status": str(worst), "database": label, "checks": checks})
    else:
        click.echo("\n".join(_lines(found)))
    return 1 if worst is Status.FAILURE else 0


def distribution() -> Finding:
    """Every command refuses to run beside a foreign ``dbqueue``; here it is one finding among others where that was got
    round."""
    try:
        check_distribution()
    except ForeignDistribution as error:
        problem, _, remedy = str(error).partition(": ")
        return Finding("distribution", Status.FAILURE, problem, remedy)
    return Finding("distribution", Status.OK, f"celery-dbqueue {__version__}, and no other package named dbqueue")


def _lines(found: list[Finding]) -> list[str]:
    wide = max(len(finding.name) for finding in found)
    indent = " " * (9 + wide + 2)
    lines = []
    for finding in found:
        begin = f"{finding.status:<9}{finding.name:<{wide}}  "
        lines += _wrapped(scrub(finding.sentence), begin, indent)
        if finding.remedy:
            lines += _wrapped(finding.remedy, f"{indent}-> ", f"{indent}   ")
    return lines


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(visible(text), WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
