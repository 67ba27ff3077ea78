"""The Celery app that ``-A`` means, and the database that its broker is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from celery import Celery
from celery.app.utils import find_app as find_as_celery_does

from dbqueue.errors import ConfigError, QueueError
from dbqueue.kombu_transport import options
from dbqueue.kombu_transport.transport import Transport
from dbqueue.queue import DBQueue


def find_app(spec: str) -> Celery | None:
    """As ``celery -A`` finds it, but never something else that has its name, such as a web application ``app``. The module, and its
    submodule ``celery`` if it has one, are imported already."""
    try:
        found = find_as_celery_does(spec)
    except AttributeError:
        return None
    if isinstance(found, Celery):
        return found
    module = found if isinstance(found, ModuleType) else None
    if module is None and ":" not in spec:
        from sys import modules

        module = modules.get(spec)
    return next((value for value in vars(module).values() if isinstance(value, Celery)), None) if module else None


def owner_of(app: Celery) -> str:
    """The name under which the app's entries are stored. Raises ConfigError."""
    name = app.conf.get("dbqueue_beat_owner") or app.main
    if not isinstance(name, str) or name == "__main__":
        raise ConfigError(
            "the Celery app has no name, by which its entries are told from those of other apps in the same database: "
            "Celery('shop', ...), or the setting dbqueue_beat_owner"
        )
    return name


def connection_of(app: Celery) -> Any:
    """A kombu Connection to the broker, not opened yet. Raises ConfigError if that is no database of ours."""
    try:
        connection = app.connection_for_write()
        if issubclass(connection.get_transport_cls(), Transport):
            return connection
    except QueueError:
        raise
    except Exception:  # noqa: S110 - another broker's client library is not installed: whatever that raises, it is not ours
        pass
    raise ConfigError(
        f"the broker of the Celery app {app.main} is not a database of dbqueue: a message there and the cursor of its schedule could not "
        "commit together. Give the app such a broker (dbqueue+postgresql://... or dbqueue+sqlite:///...), or run Celery's own scheduler "
        "(-A module:queue names a DBQueue alone)"
    )


def queue_of(app: Celery) -> DBQueue:
    """dbqueue's own view of the broker's database. No connection is made yet. Raises ConfigError."""
    connection = connection_of(app)
    read = options.read(options.database_url(connection), connection.transport_options or {}, connection.ssl)
    queue = DBQueue()
    queue.adopt(read.settings)
    return queue
