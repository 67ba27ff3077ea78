"""What commands that keep running share: their name, and what becomes of their log."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
from datetime import datetime, timezone
from typing import Any

import click

from dbqueue.cli.output import iso
from dbqueue.errors import InvalidName
from dbqueue.settings import check_name

LEVELS = ("debug", "info", "warning", "error", "critical", "fatal")


def expanded(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """%h is the host's full name, %n its first part, %d the rest: as celery has it."""
    if value is None:
        return None
    host = socket.gethostname()
    name, _dot, domain = host.partition(".")
    known = {"h": host, "n": name, "d": domain, "%": "%"}
    if unknown := [c for c in re.findall("%(.?)", value) if c not in known]:
        raise click.BadParameter(
            f"%{unknown[0]} means nothing here; there are %h (host), %n (name), %d (domain) and %%"
        )
    try:
        return check_name("worker", re.sub("%(.)", lambda match: known[match[1]], value))
    except InvalidName as error:
        raise click.BadParameter(str(error)) from None


def set_up_logging(level: str, log_format: str) -> None:
    """To stderr, unless the application has set up its own: then only the level of dbqueue's logger is ours."""
    number = logging.CRITICAL if level == "fatal" else getattr(logging, level.upper())
    logging.getLogger("dbqueue").setLevel(number)
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
        root.addHandler(handler)
        root.setLevel(number)


def _time(record: logging.LogRecord) -> str:
    return iso(datetime.fromtimestamp(record.created, timezone.utc))


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _time(record)


_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, what ``extra`` brought, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        line |= {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
