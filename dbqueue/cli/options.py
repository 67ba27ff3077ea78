"""What all commands take: which database, which form of output; and the question before something is lost."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import click

from dbqueue import settings
from dbqueue.cli import apps, output
from dbqueue.database.sqlite import Sqlite
from dbqueue.errors import ConfigError, DatabaseError, SchemaMissing, SchemaOutdated, SchemaTooNew
from dbqueue.queue import DBQueue

app_option = click.option(
    "-A", "--app", metavar="MODULE[:ATTR]", help="The module with the DBQueue or Celery app, and its name in there."
)
traceback_option = click.option(
    "--traceback", is_flag=True, expose_value=False, help="After an error, show where it happened."
)


@dataclass(frozen=True)
class Asked:
    """What the common options say."""

    app: str | None
    url: str | None
    as_json: bool

    def queue(self) -> DBQueue:
        """The queue of -A, which may be the broker of a Celery app, else of --url, else of DBQUEUE_URL or dbqueue.toml. No connection is
        made yet."""
        queue = apps.find_queue(self.app) if self.app is not None else _from_settings(self.url)
        for url in (queue.database.url, queue.database.listen_url):
            output.hide(url.password, *(value for name, value in url.query.items() if "pass" in name))
        return queue

    @contextmanager
    def opened(self) -> Iterator[DBQueue]:
        """The queue until the block ends; an error of the database says which one it was."""
        queue = self.queue()
        try:
            yield queue
        except (DatabaseError, SchemaMissing, SchemaOutdated, SchemaTooNew) as error:
            raise type(error)(f"{queue.database.label}: {error}") from error
        finally:
            queue.close()

    @contextmanager
    def existing(self) -> Iterator[DBQueue]:
        """The queue for looking and changing: neither tables nor an SQLite file are made by that."""
        with self.opened() as queue:
            queue.database.auto_migrate = False
            if not file_exists(queue):
                raise SchemaMissing("there is no such file; correct the path, or make it with `dbqueue migrate`")
            yield queue


def file_exists(queue: DBQueue) -> bool:
    """False for an SQLite file that is not there: to connect would make it."""
    dialect = queue.database.dialect
    return not isinstance(dialect, Sqlite) or os.path.exists(dialect.path)


def _from_settings(url: str | None) -> DBQueue:
    given = settings.load(with_jobs=False).jobs
    if url is not None:  # and DBQUEUE_LISTEN_URL belongs to the database that this one replaces
        given = replace(given, url=url, listen_url=None)
    if given.url is None:
        raise ConfigError(
            "no database is named: give -A or --url, or set DBQUEUE_URL, or url under [jobs] in dbqueue.toml"
        )
    queue = DBQueue()
    queue.adopt(given)
    return queue


def database_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """-A, --url, --json and --traceback; the command gets them as its first argument, ``Asked``."""

    @functools.wraps(command)
    def run(app: str | None, url: str | None, as_json: bool, **rest: Any) -> int | None:
        outer = click.get_current_context().find_root().params.get("app")
        if url is not None and app is not None:
            raise click.UsageError("give -A or --url, not both")
        return command(Asked(outer if app is None and url is None else app, url, as_json), **rest)

    run = traceback_option(run)
    run = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; errors are JSON too.")(run)
    url_help = "The database; DBQUEUE_URL keeps a password out of the process list."
    run = click.option("--url", metavar="URL", help=url_help)(run)
    return app_option(run)


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def confirmed(question: str, yes: bool) -> bool:
    """Asks on stderr; no answer at all is a usage error, since a script would wait for ever or never know."""
    if yes:
        return True
    click.echo(f"{question} [y/N]: ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer:
        output.words("")
        raise click.UsageError("stdin gave no answer; --yes answers in advance")
    if answer.strip().lower() in ("y", "yes"):
        return True
    output.words("Nothing was changed.")
    return False


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_LONGEST = 3_650 * 86_400


def duration(_: click.Context, __: click.Parameter, value: str) -> float:
    """A callback: ``90s``, ``30m``, ``12h``, ``7d``, ``2w`` as seconds. Without a unit nobody knows what was meant."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", value)
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= seconds <= _LONGEST:
        raise click.BadParameter("write a number and a unit (s, m, h, d, w), at most 3650d, as in 7d")
    return seconds


def instant(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    """A callback: an aware ISO 8601 time, such as the ``updated_at`` that ``jobs show`` prints."""
    when = None
    with contextlib.suppress(ValueError):
        when = None if value is None else datetime.fromisoformat(value.upper().replace("Z", "+00:00"))
    if value is not None and (when is None or when.tzinfo is None):
        raise click.BadParameter("write a time as `dbqueue jobs show` prints it: 2026-01-31T12:00:00.000000Z")
    return when
