"""What the commands print: JSON documents, tables, times, errors; and what they never print.

A human table is at most ``WIDTH`` columns wide. Nothing that a row holds reaches the terminal as a control character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import UUID

import click

from dbqueue.errors import Code

WIDTH = 100

# -- results -----------------------------------------------------------------------------------------------------------


def document(value: object) -> None:
    """The one JSON document of a command. ASCII only, so that no locale can break it."""
    click.echo(json.dumps(value, indent=2))


def as_json(record: Any) -> dict[str, Any]:
    """A frozen record as JSON, under its own field names and without a payload."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record) if field.name != "payload"}


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return iso(value)
    return str(value) if isinstance(value, UUID) else value


def decoded(data: bytes) -> object:
    """What it is as JSON. Raises ValueError, also for what is JSON in Python only."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def pretty(value: object) -> str:
    """Texts may hold any character: those a terminal would obey are escaped, the newlines between values are not."""
    return "\n".join(visible(line) for line in json.dumps(value, indent=2, ensure_ascii=False).split("\n"))


def iso(when: datetime) -> str:
    """Always with six digits: texts of equal length sort as the instants do, and a CAS needs every microsecond."""
    return when.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Column(NamedTuple):
    title: str
    right: bool = False
    shrinks: bool = False
    """Gives room to the others; the end of its cells stays, since the names of one program begin alike."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> None:
    cells = [[visible("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [[c.title for c in columns], *cells]) for i in range(len(columns))]
    shrinking = [i for i, column in enumerate(columns) if column.shrinks]
    for _ in range(max(0, sum(widths) + 2 * (len(widths) - 1) - WIDTH)):
        widths[max(shrinking, key=lambda i: widths[i])] -= 1
    lines = []
    for row in [[column.title for column in columns], *cells]:
        fitted = [
            cell if len(cell) <= width else "…" + cell[1 - width :] for cell, width in zip(row, widths, strict=True)
        ]
        padded = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for column, cell, width in zip(columns, fitted, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    click.echo("\n".join(lines))


def visible(text: str) -> str:
    """Keys and queue names are anybody's data: an escape sequence in one is shown, not obeyed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def age(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


# -- words and errors --------------------------------------------------------------------------------------------------


def words(text: str) -> None:
    click.echo(text, err=True)


def report(code: Code | str, message: str, *, as_json: bool) -> None:
    """An error, in one line: ``Error: message [code]``, or a JSON object."""
    line = visible(" ".join(message.split()))
    words(json.dumps({"error": str(code), "message": line}) if as_json else f"Error: {line} [{code}]")


_secrets: set[str] = set()


def hide(*secrets: object) -> None:
    """``scrub`` takes these out of every text from now on. Shorter than three characters they hide nothing."""
    for secret in secrets:
        if isinstance(secret, str) and len(secret) > 2:
            _secrets.update({secret, quote(secret, safe=""), quote(secret)})


def scrub(text: str) -> str:
    """A text that is not ours (click's, a traceback, the user's own error) without URLs and known passwords."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"\b([A-Za-z][A-Za-z0-9+.-]*)://(?!\*\*\*)[^\s'\"]*", r"\1://***", text)
