"""``dbqueue worker``: the options of ``celery worker`` where they mean the same, and what becomes of its log."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dbqueue.cli import apps
from dbqueue.cli.logs import LEVELS, expanded, set_up_logging
from dbqueue.cli.options import Asked, app_option, traceback_option
from dbqueue.errors import InvalidName, QueueError
from dbqueue.outbox import check_deliver, queue_of
from dbqueue.queue import DBQueue
from dbqueue.settings import check_name

if TYPE_CHECKING:
    from dbqueue.runtime.deliver import Delivery

log = logging.getLogger("dbqueue")

POOLS = ("threads", "processes", "prefork")


def _names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    try:
        return tuple(dict.fromkeys(check_name("queue", name.strip()) for name in value.split(",")))
    except InvalidName as error:
        raise click.BadParameter(str(error)) from None


def _outboxes(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Names and what delivers them, not imported yet."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, spec = value.partition("=")
        try:
            queue_of(name)
        except InvalidName as error:
            raise click.BadParameter(str(error)) from None
        if not equals or not spec:
            raise click.BadParameter(f"write name=module:callable; {name!r} has no callable")
        if name in found:
            raise click.BadParameter(f"outbox {name!r} is named twice; one callable delivers it")
        found[name] = spec
    return found


def _number(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):  # which no range of click's refuses
        raise click.BadParameter("nan is no number of seconds")
    return value


@click.command()
@app_option
@click.option("-Q", "--queues", metavar="A,B", callback=_names, help="Work on these queues only.")
@click.option(
    "--outbox",
    "outboxes",
    multiple=True,
    metavar="NAME=MODULE:CALLABLE",
    callback=_outboxes,
    help="Deliver this outbox with that; may be repeated.",
)
@click.option("--url", metavar="URL", help="Without -A: the database of the outboxes, if not DBQUEUE_URL.")
@click.option("-c", "--concurrency", type=click.IntRange(1, 1_000), metavar="N", help="Jobs at the same time.")
@click.option(
    "-n", "--hostname", metavar="NAME", callback=expanded, help="This worker's name; %h, %n, %d as in celery."
)
@click.option("-E", "--task-events", is_flag=True, help="Send Celery's events of tasks, for monitors such as Flower.")
@click.option("-l", "--loglevel", type=click.Choice(LEVELS, case_sensitive=False), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "-P",
    "--pool",
    type=click.Choice(POOLS),
    help="Where jobs run: threads, or, for Celery tasks, processes (prefork is the same), which are killed at their timeout.",
)
@click.option(
    "--max-jobs-per-child",
    "--max-tasks-per-child",
    type=click.IntRange(1),
    metavar="N",
    help="Replace a child process after so many jobs.",
)
@click.option(
    "--max-memory-per-child", type=click.IntRange(1), metavar="KIB", help="Replace a child that holds more than this."
)
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Run so many of these workers, and replace those that end.",
)
@click.option(
    "--lease",
    type=click.FloatRange(0.1, 7_200),
    callback=_number,
    metavar="SECONDS",
    help="How long a claim holds unrenewed.",
)
@click.option("--once", is_flag=True, help="Stop when nothing is due.")
@click.option("--max-jobs", type=click.IntRange(1), metavar="N", help="Stop after so many jobs.")
@click.option(
    "--shutdown", type=click.FloatRange(0, 3_600), callback=_number, default=30.0, show_default=True, metavar="SECONDS",
    help="After SIGTERM, wait so long for running jobs.",
)  # fmt: skip
@click.option(
    "--health-file", metavar="PATH", type=click.Path(), help="Keep it fresh while alive, for `dbqueue health`."
)
@traceback_option
def worker(
    app: str | None, queues: tuple[str, ...] | None, outboxes: dict[str, str], url: str | None, concurrency: int | None,
    hostname: str | None, task_events: bool, loglevel: str, log_format: str, pool: str | None, max_jobs_per_child: int | None,
    max_memory_per_child: int | None, processes: int | None, lease: float | None, once: bool, max_jobs: int | None,
    shutdown: float, health_file: str | None,
) -> int:  # fmt: skip
    """Run jobs. -A names the module whose import declares them all.

    SIGTERM and Ctrl-C stop it: running jobs may end, waiting ones stay in the database.

    \b
    dbqueue worker -A shop.jobs
    dbqueue worker -A shop.jobs:queue -Q mail,default -c 8 -n mail@%h -l warning
    dbqueue worker --outbox receipts=shop.mail:deliver
    """
    if url is not None and app is not None:
        raise click.UsageError("give -A or --url, not both")
    if app is None and url is None:
        app = click.get_current_context().find_root().params.get("app")
    if app is None and not outboxes:
        raise click.UsageError("a worker needs -A, the module that declares its jobs, or --outbox")
    if app is None and queues:
        raise click.UsageError("-Q needs -A, the module that declares the jobs of these queues")
    if processes is not None and health_file is not None:
        raise click.UsageError(
            "--health-file tells of one worker, and those of --processes would share it: leave one out"
        )
    if processes is not None:
        from dbqueue.cli.supervisor import supervise, without

        set_up_logging(loglevel, log_format)
        return supervise(without(sys.argv[1:], "--processes"), processes)
    from dbqueue.runtime.processes import ChildOptions  # the other commands need none of it
    from dbqueue.runtime.worker import WorkerOptions, run_worker

    with Asked(app, url, False).opened() as queue:
        set_up_logging(loglevel, log_format)
        own: tuple[str, ...] = ()
        of_children = max_jobs_per_child or max_memory_per_child
        setup, teardown = partial(set_up_logging, loglevel, log_format), None
        celery = None if app is None else _of_celery(app, queue, hostname, queues, setup)
        if task_events and celery is None:
            raise click.UsageError("-E sends Celery's events: -A must name a Celery app")
        if celery is not None:
            queues, own = celery.queues, celery.imports
            setup, teardown = celery.set_up_child, celery.tear_down_child
            concurrency, hostname = concurrency or celery.concurrency, celery.hostname
            max_jobs_per_child = max_jobs_per_child or celery.max_jobs
            max_memory_per_child = max_memory_per_child or celery.max_memory
        pool = pool or ("threads" if celery is None else "processes")
        if pool == "threads" and of_children:
            raise click.UsageError("--max-jobs-per-child and --max-memory-per-child need child processes: -P processes")
        imports = [*own, app.partition(":")[0]] if app is not None else []
        imports += [spec.partition(":")[0] for spec in outboxes.values()]
        child = (
            None
            if pool == "threads"
            else ChildOptions(tuple(dict.fromkeys(imports)), setup, max_jobs_per_child, max_memory_per_child, teardown)
        )
        options = WorkerOptions(
            queues=queues, slots=concurrency, lease=lease, name=hostname, once=once, max_jobs=max_jobs, shutdown=shutdown,
            pool=pool, child=child, health_file=health_file,
            outboxes=tuple(_delivery(*outbox) for outbox in outboxes.items()),
        )  # fmt: skip
        if celery is None:
            _warn_of_idle_queues(queue, queues or ())
            return run_worker(queue, options)
        with celery.serving(threads=pool == "threads"):
            seen = partial(celery.seen, task_events=task_events)
            return run_worker(queue, options, celery.targets, seen)


def _of_celery(
    spec: str, queue: DBQueue, name: str | None, queues: tuple[str, ...] | None, setup: Callable[[], None]
) -> Any | None:
    """What the Celery app that -A means brings along (``celery_bridge.runner.Served``); None: there is none."""
    app = apps.find_celery(spec)
    if app is None or not apps.is_broker(app, queue):
        return None
    # It stands on this package and not the other way round; so it is asked for by its name.
    return importlib.import_module("celery_bridge.runner").Served(app, spec, queue, name, queues, setup)


def _delivery(name: str, spec: str) -> Delivery:
    from dbqueue.runtime.deliver import Delivery

    try:
        module, attribute, deliver = apps.find_callable(spec)
        check_deliver(deliver)
    except apps.ImportFailed as error:
        raise apps.ImportFailed(f"--outbox {name}: " + error.message) from error.__cause__
    except QueueError as error:
        raise click.BadParameter(f"{name}: {error}", param_hint="'--outbox'") from error
    return Delivery(name, deliver, module, attribute)


def _warn_of_idle_queues(queue: DBQueue, names: Sequence[str]) -> None:
    """A misspelt -Q would wait for ever without a word. A job that is there already may be another program's."""
    known = sorted({target.policy.queue for target in queue.targets.values()})
    with suppress(QueueError):  # the worker meets it in a moment, and tells it
        idle = [name for name in names if name not in known and not queue.queues(name)]
        if idle:
            log.warning(
                "-Q %s: no target of this code sends there, and no unfinished job is there; its targets send to %s",
                ",".join(idle), ", ".join(known) or "no queue: it declares none",
            )  # fmt: skip
