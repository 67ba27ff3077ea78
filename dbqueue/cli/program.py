"""The program: its commands, and the one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from dbqueue import __version__
from dbqueue.cli import output
from dbqueue.cli.apps import ImportFailed, users_traceback
from dbqueue.cli.beat import beat
from dbqueue.cli.doctor import doctor
from dbqueue.cli.health import health
from dbqueue.cli.jobs import jobs
from dbqueue.cli.migrate import migrate
from dbqueue.cli.options import app_option, traceback_option
from dbqueue.cli.queues import queues
from dbqueue.cli.results import results
from dbqueue.cli.schedules import schedules
from dbqueue.cli.worker import worker
from dbqueue.errors import (
    Code,
    ConfigError,
    DatabaseError,
    InvalidArgument,
    InvalidTarget,
    NotSupported,
    QueueError,
    ScheduleConflict,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    TargetIsNotAValue,
)
from dbqueue.settings import mask_url

REFUSED, USAGE, UNREACHABLE, SCHEMA, BUG, INTERRUPTED, PIPE = 1, 2, 3, 4, 70, 130, 141
"""70 is EX_SOFTWARE of sysexits.h; 130 and 141 are what a shell reports for SIGINT and SIGPIPE."""

_EXITS: tuple[tuple[tuple[type[QueueError], ...], int], ...] = (
    ((SchemaMissing, SchemaOutdated, SchemaTooNew), SCHEMA),
    ((DatabaseError,), UNREACHABLE),
    ((ConfigError, InvalidTarget, InvalidArgument, TargetIsNotAValue, NotSupported, ScheduleConflict), USAGE),
)


def exit_code(error: QueueError) -> int:
    return next((code for kinds, code in _EXITS if isinstance(error, kinds)), REFUSED)


class PipeClosed(Exception):
    """A BrokenPipeError under a name that click does not answer with exit code 1, which means refused."""


class Program(click.Group):
    """A group whose errors are lines with a code; runs alike in a process and under click's test runner."""

    def main(self, args: Any = None, *rest: Any, **extra: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        sys.exit(_run(lambda: click.Group.main(self, given, "dbqueue", standalone_mode=False), given))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosed from error


def _run(command: Callable[[], Any], given: list[str]) -> int:
    as_json, trace = "--json" in given, "--traceback" in given

    def fail(code: Code, message: str, error: Exception) -> None:
        if trace:
            output.words(_traceback(error).rstrip())
        output.report(code, message, as_json=as_json)

    try:
        result = command()
        if sys.stdout is not None:  # closed by `>&-`
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.Abort:
        return INTERRUPTED
    except (PipeClosed, BrokenPipeError):
        with contextlib.suppress(OSError, ValueError):  # what is still buffered must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later
            error.show()
        else:
            fail(getattr(error, "code", Code.INVALID_ARGUMENT), _message(error, given), error)
        return error.exit_code
    except QueueError as error:
        fail(error.code, str(error), error)
        return exit_code(error)
    except Exception as error:
        fail(Code.QUEUE_ERROR, f"{type(error).__name__} where none was expected; --traceback shows where", error)
        return BUG


def _message(error: click.ClickException, given: list[str]) -> str:
    """click's words; it repeats what was typed, which may be a URL in the wrong place."""
    message = error.format_message()
    for word in given:
        value = word.partition("=")[2] if word.startswith("-") else word
        if "://" in value:
            message = message.replace(value, mask_url(value)).replace(repr(value)[1:-1], mask_url(value))
    context = error.ctx if isinstance(error, click.UsageError) else None
    return output.scrub(message).rstrip(".") + (f" (see {context.command_path} --help)" if context else "")


def _traceback(error: Exception) -> str:
    if isinstance(error, ImportFailed) and error.__cause__ is not None:
        return users_traceback(error.__cause__)
    return output.scrub("".join(traceback.format_exception(error)))


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": output.WIDTH},
    epilog="Exit codes: 0 done, 1 refused, 2 usage or configuration, 3 database unreachable or busy, 4 schema.",
)
@click.version_option(__version__, message="dbqueue %(version)s")
@app_option
@traceback_option
def program(app: str | None) -> None:
    """dbqueue: durable jobs in the database that you already have.

    The database is the one of -A, of --url, of DBQUEUE_URL or of ./dbqueue.toml.

    \b
    dbqueue migrate --url postgresql://shop@db/shop
    dbqueue worker -A shop.jobs -c 8
    dbqueue jobs list -A shop.jobs --state dead
    """


for command in (worker, beat, health, migrate, jobs, queues, results, schedules, doctor):
    program.add_command(command)
