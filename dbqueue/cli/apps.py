"""The DBQueue that ``-A module[:attr]`` means, or the Celery app, as ``celery -A`` finds it.

The module is imported as ``python -m`` would import it from here: the current directory is on the path. Its own errors
are the user's to read, so they are told with file and line.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import click

from dbqueue.cli.distribution import check_distribution
from dbqueue.cli.output import scrub
from dbqueue.errors import Code, ConfigError, QueueError
from dbqueue.queue import DBQueue

log = logging.getLogger("dbqueue")

__all__ = ["ImportFailed", "check_distribution", "find_celery", "find_queue"]

SUBMODULES = ("queue", "app")
"""Where a package keeps its DBQueue if not in itself."""


class ImportFailed(click.ClickException):
    """The user's module raised ``__cause__`` at import. Its message quotes that, so it is no QueueError."""

    exit_code = 2
    code = Code.CONFIG_ERROR


def find_queue(spec: str) -> DBQueue:
    """The DBQueue of ``module``, ``module:attr`` or ``package``; without one, that of the broker of the Celery app there. Raises
    ConfigError, ImportFailed, or the QueueError that the module itself raised."""
    name, attribute = _parts(spec)
    module = _import(name)
    if attribute:
        value = _named(module, attribute)
        return value if isinstance(value, DBQueue) else _of_broker(value)
    found = _queues_of(module)
    looked = [name]
    for submodule in SUBMODULES if not found and hasattr(module, "__path__") else ():
        full = f"{name}.{submodule}"
        if importlib.util.find_spec(full) is not None:
            looked.append(full)
            found.update(_queues_of(_import(full)))
    distinct = {id(queue): (where, queue) for where, queue in reversed(found.items())}
    if len(distinct) == 1:
        return next(iter(distinct.values()))[1]
    if not distinct:
        if (celery := find_celery(spec)) is not None:
            return _of_broker(celery)
        raise ConfigError(
            f"there is no DBQueue in {', '.join(looked)}; name the one that you mean: -A module:attribute"
        )
    raise ConfigError(_several(dict(sorted(distinct.values(), key=lambda item: item[0]))))


def find_callable(spec: str) -> tuple[str, str, Callable[..., Any]]:
    """What ``module:callable`` means, with the two names. Raises as ``find_queue``."""
    name, colon, attribute = spec.partition(":")
    if not colon or not _dotted(name) or not _dotted(attribute):
        raise ConfigError("write module:callable, as in shop.mail:send")
    value: object = _import(name, "")
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{name} has no attribute {attribute!r}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"{name}:{attribute} cannot be called, its type is {type(value).__name__}")
    return name, attribute, value


def find_celery(spec: str) -> Any | None:
    """The Celery app that is meant as well, or alone; None also where one DBQueue was named. Celery is not imported for a program that
    does not use it. Raises as ``find_queue``."""
    name, attribute = _parts(spec)
    module = _import(name)
    submodule = f"{name}.celery"
    if hasattr(module, "__path__") and not attribute and importlib.util.find_spec(submodule) is not None:
        _import(submodule)
    if "celery" not in sys.modules:
        return None
    if attribute:
        value = _named(module, attribute)
        return None if isinstance(value, DBQueue) else value
    from dbqueue.celery_beat.broker import find_app

    return find_app(spec)


def _parts(spec: str) -> tuple[str, str]:
    name, colon, attribute = spec.partition(":")
    if not _dotted(name) or (colon and not _dotted(attribute)):
        raise ConfigError(_wrong_spelling(spec))
    return name, attribute


def _of_broker(app: Any) -> DBQueue:
    from dbqueue.celery_beat.broker import queue_of

    return queue_of(app)


def is_broker(app: Any, queue: DBQueue) -> bool:
    """Whether the app's messages are rows of the queue's database; False: it has another broker, and its tasks are no business of ours.
    Raises ConfigError for another database of ours."""
    from dbqueue.celery_beat.broker import queue_of

    try:
        broker = queue_of(app)
    except ConfigError:
        log.warning("the Celery app %s has another broker: `celery worker` runs its tasks", app.main)
        return False
    if _place(broker) != _place(queue):
        raise ConfigError(
            f"the Celery app {app.main} has its broker in {broker.database.label}, and the DBQueue of -A is on {queue.database.label}: "
            "a worker works for one of them; start one for each (-A module:attribute)"
        )
    return True


def _is_celery(value: object) -> bool:
    return "celery" in sys.modules and isinstance(value, sys.modules["celery"].Celery)


def _dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _wrong_spelling(spec: str) -> str:
    if "://" in spec:
        return "-A takes a module, not a URL: use --url"
    takes = "-A takes a module or module:attribute, as in -A shop.jobs:queue"
    file = re.fullmatch(r"(?:\./)?([\w./-]+?)(?:\.py)?/?(:\w+)?", spec)
    guess = file[1].replace("/", ".") + (file[2] or "") if file else ""
    return f"{takes}; write -A {guess}" if file and guess != spec and _dotted(guess.partition(":")[0]) else takes


# -- importing ---------------------------------------------------------------------------------------------------------


def _import(name: str, option: str = "-A ") -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # and it stays: jobs import late
    try:
        return importlib.import_module(name)
    except QueueError:
        raise  # a declaration of the module is wrong, and the message says which
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _users_part(error.__traceback__) is None:
            raise ConfigError(_not_found(name, option)) from None
        raise ImportFailed(_describe(name, error)) from error


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on: without ours and the import system's."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen importlib") and file != importlib.__file__:
            return trace
        trace = trace.tb_next
    return None


def _not_found(name: str, option: str) -> str:
    parent, _, last = name.rpartition(".")
    if parent and hasattr(sys.modules.get(parent), last):
        return (
            f"there is no module {name!r}, but {parent!r} has an attribute of that name: write {option}{parent}:{last}"
        )
    if last == "py":
        return f"there is no module {name!r}; a module is asked for and not its file: write {option}{parent}"
    return f"there is no module {name!r} in {os.getcwd()} or on Python's path"


def _describe(name: str, error: BaseException) -> str:
    frames = traceback.extract_tb(_users_part(error.__traceback__))
    text = " ".join(str(error).split())
    where = ""
    if frames and not isinstance(error, SyntaxError):  # its own text says where
        where = f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno})"
    if isinstance(error, SystemExit):
        text = "it exits while it is imported; put that under `if __name__ == '__main__':`"
    return scrub(f"importing {name} failed: {type(error).__name__}: {text}{where}; --traceback shows all")


def users_traceback(error: BaseException) -> str:
    """The user's error as Python would print it, without the frames that led to the import."""
    return scrub("".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))))


# -- choosing ----------------------------------------------------------------------------------------------------------


def _named(module: ModuleType, attribute: str) -> Any:
    """A DBQueue or a Celery app."""
    value: object = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{module.__name__} has no attribute {attribute!r}; {_offer(module)}")
        value = getattr(value, part)
    if not isinstance(value, DBQueue) and not _is_celery(value):
        raise ConfigError(
            f"{module.__name__}:{attribute} is no DBQueue, its type is {type(value).__name__}; {_offer(module)}"
        )
    return value


def _offer(module: ModuleType) -> str:
    return f"it has: {', '.join(found)}" if (found := _queues_of(module)) else "it has no DBQueue"


def _queues_of(module: ModuleType) -> dict[str, DBQueue]:
    return {f"{module.__name__}:{name}": value for name, value in vars(module).items() if isinstance(value, DBQueue)}


def _several(found: dict[str, DBQueue]) -> str:
    """A process works for one database, and nobody but the user can say for which (D5)."""
    if len({_place(queue) for queue in found.values()}) == 1:
        return f"there is more than one DBQueue: {', '.join(found)}; name the one that you mean: -A {next(iter(found))}"
    told = ", ".join(f"{name} ({queue.database.label})" for name, queue in found.items())
    return (
        f"targets are bound to conflicting databases: {told}; a process works for one of them: "
        f"name it (-A {next(iter(found))}) and start another process for the other"
    )


def _place(queue: DBQueue) -> tuple[object, ...]:
    """Tells databases apart by name, without a connection: users and passwords do not count."""
    url, names = queue.database.url, queue.database.dialect.names
    if url.drivername == "sqlite":
        return os.path.realpath(url.database or ""), names.prefix
    return url.host, url.port or 5432, url.database, url.query.get("host"), names.schema, names.prefix
