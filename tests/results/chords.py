"""A Celery app whose broker and results are ours, and its smallest worker: it takes a message, runs Celery's own tracer, and acks.

So a test decides in which order parts of a chord return, which of them come twice, and what happens meanwhile.
"""

from __future__ import annotations

from typing import Any

import kombu
from celery import Celery, _state
from celery.app.trace import trace_task
from celery.exceptions import TaskRevokedError
from celery.worker.request import Context

from dbqueue.database.engine import Database

Message = Any


class Failed(Exception):
    pass


def make_app(broker: str, backend: str, **settings: Any) -> Celery:
    app = Celery("chords", broker=broker, backend=backend, set_as_current=False)
    app.conf.update(task_default_queue="q", **settings)

    @app.task(shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(shared=False)
    def total(numbers: Any, more: int = 0) -> Any:
        return [numbers, more] if more else numbers

    @app.task(shared=False)
    def fail() -> None:
        raise Failed("no")

    @app.task(shared=False)
    def told(request_id: str) -> str:
        return request_id

    @app.task(shared=False, bind=True)
    def adds(self: Any, x: int) -> int:
        self.add_to_chord(add.s(x, 100))
        return x

    return app


class Hand:
    """One connection to the broker, and the tasks that it runs."""

    def __init__(self, app: Celery, queue: str = "q") -> None:
        self.app, self._queue = app, queue
        self._connection: kombu.Connection = app.connection_for_read()
        self._channel = self._connection.channel()
        kombu.Queue(queue, kombu.Exchange(queue), routing_key=queue)(self._channel).declare()

    def close(self) -> None:
        self._connection.close()

    def take(self) -> Message:
        message = self._channel.basic_get(self._queue)
        assert message is not None, "nothing waits"
        return message

    def take_all(self) -> list[Message]:
        return list(iter(lambda: self._channel.basic_get(self._queue), None))

    def run(self, message: Message) -> None:
        """Once; it may run again, as if it had been delivered again."""
        run(self.app, request_of(message))

    def drain(self) -> list[str]:
        """Runs and acks whatever waits, and what that publishes; returns the names of the tasks."""
        ran = []
        while (message := self._channel.basic_get(self._queue)) is not None:
            self.run(message)
            message.ack()
            ran.append(message.headers["task"].rpartition(".")[2])
        return ran


def request_of(message: Message) -> dict[str, Any]:
    args, kwargs, embed = message.decode()
    return {
        **message.headers, **embed, "args": args, "kwargs": kwargs, "is_eager": False, "hostname": "hand",
        "delivery_info": dict(message.delivery_info, redelivered=False),
    }  # fmt: skip


def run(app: Celery, request: dict[str, Any]) -> None:
    """As in a worker, the app is the thread's current one meanwhile."""
    before = _state.get_current_app() if _state._tls.current_app is not None else None
    app.set_current()
    try:
        _run(app, request)
    finally:
        _state._set_current_app(before)


def _run(app: Celery, request: dict[str, Any]) -> None:
    trace_task(app.tasks[request["task"]], request["id"], request["args"], request["kwargs"], dict(request), app=app)


def revoke(app: Celery, message: Message) -> None:
    """What a worker does with a message that it knows as revoked."""
    request = Context(request_of(message))
    app.backend.mark_as_revoked(request.id, str(TaskRevokedError("revoked")), request=request)


def rows(database: Database, statement: str) -> list[Any]:
    return database.read(lambda session: session.execute(statement))


def messages(database: Database, task_id: str) -> int:
    """How many messages with this task's id there ever were."""
    return sum(
        int(rows(database, f"SELECT count(*) FROM {table} WHERE task_id = '{task_id}'")[0][0])
        for table in ("dbqueue_jobs", "dbqueue_finished")
    )


def count(database: Database, table: str) -> int:
    return int(rows(database, f"SELECT count(*) FROM dbqueue_{table}")[0][0])
