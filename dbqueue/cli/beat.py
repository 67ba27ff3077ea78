"""``dbqueue beat``: fires schedules; the options of ``celery beat`` where they mean the same."""

from __future__ import annotations

import click

from dbqueue.cli import apps
from dbqueue.cli.logs import LEVELS, expanded, set_up_logging
from dbqueue.cli.options import Asked, app_option, traceback_option


@click.command()
@app_option
@click.option("--url", metavar="URL", help="The database, where no code declares schedules.")
@click.option("-n", "--hostname", metavar="NAME", callback=expanded, help="This beat's name; %h, %n, %d as in celery.")
@click.option("-l", "--loglevel", type=click.Choice(LEVELS, case_sensitive=False), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--max-interval", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, metavar="SECONDS",
    help="Look at least so often whether schedules changed.",
)  # fmt: skip
@traceback_option
def beat(
    app: str | None, url: str | None, hostname: str | None, loglevel: str, log_format: str, max_interval: float
) -> int:
    """Fire schedules. Start as many as you like: every slot is fired once.

    Schedules are rows of the database (see `dbqueue schedules`); those that the module of -A declares are written at the
    start. A beat that was down makes up for it as each schedule's catch_up says. If the module has a Celery app, its
    entries are fired too; of two versions of the code, those of the beat that started last.

    \b
    dbqueue beat -A shop.jobs
    dbqueue beat --url postgresql://shop@db/shop -l warning
    """
    from dbqueue.runtime.beat import run_beat  # the other commands need none of it

    app = click.get_current_context().find_root().params.get("app") if app is None and url is None else app
    if app is not None and url is not None:
        raise click.UsageError("give -A or --url, not both")
    with Asked(app, url, False).opened() as queue:
        set_up_logging(loglevel, log_format)
        celery = None if app is None else apps.find_celery(app)
        if celery is None:
            return run_beat(queue, name=hostname, poll=max_interval)
        from dbqueue.celery_beat.scheduler import source_of

        return run_beat(queue, [source_of(celery)], name=hostname, poll=max_interval)
