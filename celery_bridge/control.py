"""Remote control of a worker that runs a Celery app's tasks: it is asked and steered as a ``celery worker`` is (C6).

Celery's own panel of commands answers, custom commands included; what it finds as its consumer is the stand-in below. One thread
reads the worker's mailbox and runs the commands; a command that is for the worker's loop is handed to it. What this worker cannot do
is refused in the reply.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

from celery import Celery, signals
from celery.exceptions import InvalidTaskError, NotRegistered, WorkerShutdown, WorkerTerminate
from celery.platforms import signals as signal_numbers
from celery.utils.collections import AttributeDict
from celery.worker import state as worker_state
from celery.worker.control import Panel
from celery.worker.request import Request

from celery_bridge.events import Events
from dbqueue import events
from dbqueue.database.tables import ClaimedRow, Settlement
from dbqueue.errors import ConnectionLost, NotSupported
from dbqueue.kombu_transport import message as messages
from dbqueue.runtime.execute import Work
from dbqueue.runtime.worker import Worker
from dbqueue.settings import check_name
from dbqueue.states import Kind

log = logging.getLogger("dbqueue.celery")

LOOK = 1.0
"""Seconds for which the thread waits for a command at a time."""
RETRY_FIRST, RETRY_MOST = 0.5, 5.0
STEADY = 15.0
END_PATIENCE = 3.0
KILLS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT})
"""Signals that end a process: with any of them a child is killed. Others would mean something to the task."""
REFUSED = {
    "rate_limit": "this worker keeps no rate limits",
    "pool_restart": "children cannot be restarted: restart the worker",
    "autoscale": "this worker does not scale itself: pool_grow and pool_shrink do",
    "election": "this worker takes part in no election",
}
CREDENTIALS = re.compile(r"(://[^\s:/@'\"]*:)[^\s@'\"]+@")
NEED_NO_TASKS = frozenset({"ping", "hello", "heartbeat", "stats", "registered", "conf", "active_queues", "clock"})


class Control:
    """One worker's ears and voice. Everything of it that the worker's loop calls returns at once."""

    def __init__(self, app: Celery, hostname: str, worker: Worker, *, task_events: bool) -> None:
        self.app, self.hostname, self.worker = app, hostname, worker
        self.total: Counter[str] = Counter()
        self.started_at = datetime.now(timezone.utc)
        wanted = task_events or bool(app.conf.worker_send_task_events)
        self.events = Events(app, hostname, lambda: (len(worker.at_work()), self.total.total()), tasks=wanted)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._line: Any = None
        """The transport on which its thread waits."""
        self._consumer = Consumer(self)
        worker.claims.on_blocked = self.blocked
        self._running: list[Running] = []
        """The tasks that Celery's state of a worker names now, which holds them weakly."""

    # -- what the worker's loop tells --------------------------------------------------------------------------------

    def hear(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerStarted):
            self.events.start()
            if self.app.conf.worker_enable_remote_control:
                self._thread = threading.Thread(target=self._run, name="dbqueue-control", daemon=True)
                self._thread.start()

    def received(self, request: Request) -> None:
        signals.task_received.send(sender=self._consumer, request=request)

    def blocked(self, row: ClaimedRow, end: Settlement) -> None:
        """Celery's signals of messages that cannot run. Of what was wrong there is the name only."""
        if not (signals.task_unknown.receivers or signals.task_rejected.receivers):
            return
        try:
            message = messages.incoming(
                row.head or b"", row.payload, redelivered=False, accept=self.app.conf.accept_content
            )
            name = message.headers.get("task")
        except Exception as error:  # it is none
            log.debug("%s is not told: %s", row.target, type(error).__name__)
            return
        if end.kind is not Kind.UNKNOWN_TARGET:
            signals.task_rejected.send(
                sender=self._consumer, message=message, exc=InvalidTaskError(end.summary or end.kind)
            )
        elif isinstance(name, str):
            signals.task_unknown.send(
                sender=self._consumer, message=message, exc=NotRegistered(name), name=name, id=row.task_id
            )
        else:
            signals.task_rejected.send(sender=self._consumer, message=message, exc=None)

    def started(self, task: str, work: Work) -> None:
        self.total[task] += 1
        if self.events.wants_tasks and self.app.tasks[task].send_events:
            self.events.begun(work.row.head or b"")

    def is_revoked(self, row: ClaimedRow) -> bool:
        """Whether remote control told this worker alone so; what all are told is kept in the database."""
        if row.task_id is not None and row.task_id in worker_state.revoked:
            return True
        stamps = messages.stamps_in(row.head or b"") if worker_state.revoked_stamps else frozenset()
        return bool(stamps) and not stamps.isdisjoint(messages.stamps_of(worker_state.revoked_stamps))

    def stop(self) -> None:
        """Leaves the mailbox and says goodbye; waits a few seconds at most."""
        self._ending.set()
        line = self._line
        if line is not None:
            line.trouble(ConnectionLost("the worker ends"))  # its thread waits no longer
        if self._thread is not None:
            self._thread.join(END_PATIENCE)
        self.events.stop()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause, told = RETRY_FIRST, False
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                self._listen()
            except Exception as error:  # whatever it is: the worker has to go on, and this with it
                if self._ending.is_set():
                    return
                if time.monotonic() - began > STEADY:  # a new trouble
                    pause, told = RETRY_FIRST, False
                if not told:
                    log.warning("remote control is interrupted: %s", type(error).__name__)
                told = True
                self._ending.wait(pause)
                pause = min(pause * 2, RETRY_MOST)

    def _listen(self) -> None:
        """Until the worker ends. Raises whatever happens to the connection."""
        with self.app.connection_for_read() as connection:
            connection.connect()
            self._line = connection.connection
            station = self._line.station
            if self.worker.listens_to(station.database):  # one session less
                station.listen_elsewhere(lambda names: self.worker.hear(names, station.heard))
            node = self.app.control.mailbox.Node(
                self.hostname, state=self._state(), handlers=handlers(), channel=connection.channel()
            )
            consumer = node.listen(callback=lambda body, message: self._obey(node, body, message))
            try:
                while not self._ending.is_set():
                    try:
                        connection.drain_events(timeout=LOOK)
                    except TimeoutError:
                        continue
            finally:
                self._line = None
                consumer.cancel()

    def _state(self) -> Any:
        return AttributeDict(app=self.app, hostname=self.hostname, consumer=self._consumer, tset=set)

    def _obey(self, node: Any, body: Any, message: Any) -> None:
        self.app.clock.forward()
        try:
            if body.get("method") not in NEED_NO_TASKS:
                self._show_tasks()
            node.handle_message(body, message)
        except (WorkerShutdown, WorkerTerminate):
            self.worker.stop("remote control")
        except Exception as error:
            log.error("a command of remote control failed: %s", type(error).__name__)

    def _show_tasks(self) -> None:
        """Celery's state of a worker is what its commands look at: what runs is put there before each."""
        where = {work: pid for pid, work in self.worker.slots.processes().items() if work is not None}
        found = []
        for running in self.worker.at_work():
            work = running.work
            try:
                found.append(Running(self, work, where.get(work, os.getpid()), running.started_at))
            except Exception as error:  # not one of a Celery task, or one that cannot be read
                log.debug("%s is not shown: %s", work.row.target, type(error).__name__)
        worker_state.requests.clear()
        worker_state.active_requests.clear()
        worker_state.reserved_requests.clear()
        self._running = found
        for request in found:
            worker_state.requests[request.id] = request
            worker_state.reserved_requests.add(request)
            worker_state.active_requests.add(request)


class Running(Request):  # type: ignore[misc]
    """A task that a slot works on, as Celery's commands see it."""

    def __init__(self, control: Control, work: Work, pid: int, started_at: float) -> None:
        app, row = control.app, work.row
        incoming = messages.incoming(
            row.head or b"", row.payload, redelivered=row.attempt > 1, accept=app.conf.accept_content
        )
        super().__init__(incoming, app=app, hostname=control.hostname)
        self._work, self._worker = work, control.worker
        self.worker_pid = pid
        self.time_start = time.time() - (time.monotonic() - started_at)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        number = signal_numbers.signum(signal or "TERM")
        if number not in KILLS:
            names = ", ".join(sorted(kill.name for kill in KILLS))
            raise NotSupported(f"a task can be terminated by {names} only")
        self._worker.terminate(self._work, int(number))


def handlers() -> dict[str, Callable[..., Any]]:
    """The commands by name."""
    telling = {name: _without_secrets(Panel.data[name]) for name in ("conf", "dump_conf", "report")}
    return {**Panel.data, **telling, **{name: _refusal(why) for name, why in REFUSED.items()}}


def _without_secrets(command: Callable[..., Any]) -> Callable[..., Any]:
    """Celery hides passwords in the settings that it knows, and not those in the options of a transport or a backend."""

    def tell(state: Any, **arguments: Any) -> Any:
        return _scrubbed(command(state, **arguments))

    return tell


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _scrubbed(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scrubbed(each) for each in value]
    return CREDENTIALS.sub(r"\1**@", value) if isinstance(value, str) else value


def _refusal(why: str) -> Callable[..., Any]:
    def refuse(state: Any, **arguments: Any) -> dict[str, str]:
        return {"error": f"dbqueue worker: {why}"}

    return refuse


class Consumer:
    """What Celery's commands ask of the worker's consumer, its controller and its pool, which are one here."""

    gossip = autoscaler = None

    def __init__(self, control: Control) -> None:
        self._control = control
        self.app, self.hostname, self.event_dispatcher = control.app, control.hostname, control.events
        self.controller = self.pool = self
        self.timer = SimpleNamespace(schedule=SimpleNamespace(queue=()))  # ETAs wait in the database
        self._queues: dict[str, Any] = {queue.name: queue for queue in control.app.amqp.queues.consume_from.values()}

    @property
    def task_consumer(self) -> Any:
        return SimpleNamespace(queues=list(self._queues.values()))

    @staticmethod
    def call_soon(verb: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """At once, so that an error is in the reply."""
        verb(*arguments, **options)

    def add_task_queue(
        self, name: str, exchange: str | None = None, exchange_type: str | None = None, routing_key: str | None = None, **options: Any
    ) -> None:  # fmt: skip
        check_name("queue", name)
        known = self.app.amqp.queues
        queue = (
            known[name]
            if name in known
            else known.select_add(
                name, exchange=exchange or name, exchange_type=exchange_type, routing_key=routing_key, **options
            )
        )
        with self.app.connection_for_write() as connection:
            queue(connection.default_channel).declare()
        self._queues[queue.name] = queue
        self._control.worker.consume(queue.name)

    def cancel_task_queue(self, name: str) -> None:
        self.app.amqp.queues.deselect(name)
        self._queues.pop(name, None)
        self._control.worker.cease(name)

    def grow(self, n: int) -> None:
        self._control.worker.resize(_positive(n))

    def shrink(self, n: int) -> None:
        self._control.worker.resize(-_positive(n))

    def _update_prefetch_count(self, change: int) -> None:
        """Nothing is claimed before a slot is idle."""

    def stats(self) -> dict[str, Any]:
        control = self._control
        options = control.worker.options
        child = options.child
        processes = list(control.worker.slots.processes()) or [os.getpid()]
        uptime = datetime.now(timezone.utc) - control.started_at
        pool = {
            "implementation": f"dbqueue:{options.pool}",
            "max-concurrency": control.worker.slots.size,
            "processes": processes,
            "max-tasks-per-child": (child.max_jobs if child is not None else None) or "N/A",
            "timeouts": (0, 0),  # each task has its own
            "writes": "N/A",
        }
        return {
            "total": dict(control.total),
            "pid": os.getpid(),
            "clock": str(self.app.clock),
            "uptime": round(uptime.total_seconds()),
            "pool": pool,
            "broker": self._broker(),
            "rusage": _usage(),
        }

    def _broker(self) -> dict[str, Any]:
        """Without passwords, which may stand in each of the URLs."""
        with self.app.connection_for_read() as connection:
            told: dict[str, Any] = connection.info()
            told["hostname"] = connection.as_uri()
        told.pop("password", None)
        shown: dict[str, Any] = _scrubbed(told)
        return shown


def _positive(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise NotSupported("say how many slots, from 1")
    return n


def _usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {name.removeprefix("ru_"): getattr(used, name) for name in dir(used) if name.startswith("ru_")}
