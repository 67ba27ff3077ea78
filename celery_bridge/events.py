"""Celery's events of one worker: that it is there, and what becomes of its tasks.

One thread sends all of them on one connection. Whoever has something to tell puts it into a bounded line and goes on: a broker that
does not answer, or takes no events, costs events and nothing else. What a task's end is told with is put together in the slot that
ran it (``Report``), and sent once the database has agreed to that end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

from celery import Celery, signals
from celery.utils.sysinfo import load_average
from celery.worker.state import SOFTWARE_INFO

from dbqueue.kombu_transport import message as messages

log = logging.getLogger("dbqueue.celery")

HEARTBEAT = 2.0
"""Seconds between two signs of life, as Celery's worker has it."""
MOST_WAITING = 10_000
"""Events in the line; the oldest go when there are more."""
BATCH = 100
"""Events of tasks in one message."""
RETRY_FIRST, RETRY_MOST = 1.0, 10.0
END_PATIENCE = 3.0
"""Seconds at the end for what is still in the line."""


class Report:
    """The events of one task's end, collected where it ran: what Celery's ``Request`` takes for its dispatcher."""

    enabled = True

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def send(self, type: str, **fields: Any) -> None:
        self.events.append((type, fields | {"timestamp": time.time()}))


class _Begun(NamedTuple):
    """A task that was received and started: its message is read by the thread that sends."""

    head: bytes
    at: float


class Events:
    """For remote control it is the worker's event dispatcher: ``groups``, ``enabled``, ``send``."""

    enabled = True

    def __init__(self, app: Celery, hostname: str, figures: Callable[[], tuple[int, int]], *, tasks: bool) -> None:
        """``figures``: how many tasks run now, and how many there were. ``tasks``: their events are wanted from the start."""
        self._app, self._hostname, self._figures = app, hostname, figures
        self.groups = {"worker", "task"} if tasks else {"worker"}
        self._waiting: deque[_Begun | tuple[str, dict[str, Any]]] = deque(maxlen=MOST_WAITING)
        self._bell, self._ending = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._connection: Any = None
        self._dispatcher: Any = None
        self._again_at, self._pause, self._lost = 0.0, RETRY_FIRST, 0

    @property
    def wants_tasks(self) -> bool:
        return "task" in self.groups

    def send(self, type: str, **fields: Any) -> None:
        self.extend([(type, fields | {"timestamp": time.time()})])

    def begun(self, head: bytes) -> None:
        """A task was received, and started."""
        self._put(_Begun(head, time.time()))

    def extend(self, events: Iterable[tuple[str, dict[str, Any]]]) -> None:
        for event in events:
            self._put(event)

    def _put(self, event: _Begun | tuple[str, dict[str, Any]]) -> None:
        self._lost += len(self._waiting) == MOST_WAITING
        self._waiting.append(event)
        if not self._bell.is_set():
            self._bell.set()

    # -- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="dbqueue-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sends what is left, and that the worker has gone."""
        self._ending = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join(END_PATIENCE)

    def _run(self) -> None:
        self._heartbeat("worker-online")
        beat_at = time.monotonic() + HEARTBEAT
        while not self._ending:
            if time.monotonic() >= beat_at:
                self._heartbeat("worker-heartbeat")
                beat_at = time.monotonic() + HEARTBEAT
            if self._waiting and time.monotonic() >= self._again_at:
                self._deliver()
            else:
                due = min(beat_at, self._again_at) if self._waiting else beat_at
                self._bell.wait(max(0.0, due - time.monotonic()))
                self._bell.clear()
        self._heartbeat("worker-offline")
        self._deliver()
        self._close()

    def _heartbeat(self, kind: str) -> None:
        active, processed = self._figures()
        signals.heartbeat_sent.send(sender=self)
        self.send(kind, freq=HEARTBEAT, active=active, processed=processed, loadavg=load_average(), **SOFTWARE_INFO)

    def _deliver(self) -> None:
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            dispatcher = self._open()
            for event in taken:
                for kind, fields in _spelt_out(event) if isinstance(event, _Begun) else (event,):
                    dispatcher.send(kind, **fields)
            dispatcher.flush(errors=False)
        except Exception as error:  # whatever it is: the worker has to go on
            self._failed(error, len(taken))
            return
        self._pause = RETRY_FIRST
        if self._lost:
            lost, self._lost = self._lost, 0
            log.warning("events are sent again; %d were lost", lost)

    def _failed(self, error: Exception, events: int) -> None:
        if not self._lost:
            log.warning("events cannot be sent (%s); they are dropped until they can", type(error).__name__)
        self._lost += events
        self._close()
        self._again_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, RETRY_MOST)

    def _open(self) -> Any:
        if self._dispatcher is None:
            self._connection = self._app.connection_for_write()
            self._connection.connect()
            self._dispatcher = self._app.events.Dispatcher(
                self._connection, self._hostname, buffer_while_offline=False, buffer_group={"task"}, buffer_limit=BATCH
            )
        return self._dispatcher

    def _close(self) -> None:
        connection, self._connection, self._dispatcher = self._connection, None, None
        if connection is not None:
            try:
                connection.release()
            except Exception as error:
                log.debug("the connection of the events was not closed well: %s", type(error).__name__)


def _spelt_out(begun: _Begun) -> list[tuple[str, dict[str, Any]]]:
    told = messages.headers_of(begun.head)
    uuid = told.get("id")
    fields = {
        "uuid": uuid, "name": told.get("shadow") or told.get("task"), "args": told.get("argsrepr", ""),
        "kwargs": told.get("kwargsrepr", ""), "root_id": told.get("root_id"), "parent_id": told.get("parent_id"),
        "retries": told.get("retries", 0), "eta": _text(told.get("eta")), "expires": _text(told.get("expires")),
        "timestamp": begun.at,
    }  # fmt: skip
    return [("task-received", fields), ("task-started", {"uuid": uuid, "timestamp": begun.at})]


def _text(when: Any) -> Any:
    return when.isoformat() if isinstance(when, datetime) else when
