"""A Celery app's tasks as targets of our worker: ``dbqueue worker -A proj`` where proj holds a Celery app (C6).

The rows are the messages of the Kombu transport; what a task sees is Celery's: its own tracer runs it. What the tracer stores and
publishes when the task's body is over (its result, its chord's part, callbacks, the next of its chain, its retry) is recorded, and
written in the one transaction that ends the row, if broker and results are the same database: then a task that has ended has told so,
however its process dies. What the body itself publishes goes out at once. With other results they are stored first, and the row is
ended after that: at least once.

A crash costs an attempt; after ``CRASHES`` of them the task fails as WorkerLostError, as it does for its time limit: a slot tells
its result, its chord and its error callbacks so, while the claim is still held.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from billiard.einfo import ExceptionInfo
from celery import Celery, signals, states
from celery._state import _set_task_join_will_block, _task_stack
from celery.app.task import Task
from celery.app.trace import build_tracer, setup_worker_optimizations, task_has_custom, trace_task
from celery.exceptions import InvalidTaskError, Reject, SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery.utils.nodenames import default_nodename
from celery.utils.saferepr import saferepr
from celery.utils.serialization import get_pickled_exception
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state as worker_state
from celery.worker.request import Request

from celery_bridge.control import Control
from celery_bridge.events import Events, Report
from celery_bridge.protocol1 import as_protocol_2
from dbqueue import clock, events
from dbqueue.celery_backend import Backend
from dbqueue.celery_backend.recording import Record
from dbqueue.cli import apps
from dbqueue.cli.supervisor import PLACE
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import ClaimedRow, Fact, Settlement
from dbqueue.errors import ConnectionLost, DatabaseBusy, NotSupported
from dbqueue.kombu_transport import ledger, recorded
from dbqueue.kombu_transport import message as messages
from dbqueue.queue import DBQueue
from dbqueue.runtime.execute import ForeignTarget, Outcome, Work
from dbqueue.runtime.idle import IdleSessions
from dbqueue.runtime.worker import Worker
from dbqueue.states import Kind, OnCrash, State
from dbqueue.targets import JobRef, Policy

log = logging.getLogger("dbqueue.celery")

CRASHES = 3
BUSY_FIRST, BUSY_MOST = 0.002, 0.1
SETTLE_PATIENCE = 60.0
"""Seconds for which a task's end is tried to be written; then its lease decides."""


class _Nowhere:
    def write(self, jobs: Any) -> list[JobRef]:
        raise NotSupported("a Celery task is called by its own delay() or apply_async()")


class _OfApp(ForeignTarget):
    address = ("celery_bridge.runner", "find")

    def __init__(self, runner: Runner, name: str) -> None:
        policy = Policy(messages.UNLIMITED, 0, runner.queue, 0, OnCrash.RETRY, None)
        super().__init__(name, _not_called, None, policy, _Nowhere())  # type: ignore[arg-type]  # no payload of ours
        self._runner = runner


class AppTask(_OfApp):
    """One task of the app. ``notice``: of the rows that only tell that it was revoked."""

    crashes = CRASHES

    def __init__(self, runner: Runner, task: str, *, notice: bool = False) -> None:
        super().__init__(runner, messages.notice_target_of(task) if notice else messages.target_of(task))
        self._task, self._notice = task, notice

    def ending(self, row: ClaimedRow, now: int) -> Settlement | None:
        """The message's time to live, or its queue's, has passed. A task's own ``expires``, which Celery sends as both, is told instead."""
        if row.expires_at is None or row.expires_at > now or messages.has_expiry(row.head or b""):
            return None
        return ledger.expired(row)

    def names(self, row: ClaimedRow) -> Sequence[str]:
        task_id = row.task_id or messages.task_id_of(row.head or b"") or ""
        return () if self._notice else (task_id, *messages.stamps_in(row.head or b""))

    def verdict(self, row: ClaimedRow, now: int) -> Kind | None:
        """Leases are lost with the whole worker, which a task can take down as well as its own process. What a worker of Celery's finds
        expired by its own clock is so by the database's here."""
        if self._notice:
            return None
        if row.lapses >= self.crashes:
            return Kind.CRASHED
        expires_at = self._runner.expires_at(row)
        return Kind.EXPIRED if expires_at is not None and now > expires_at else None

    def waits(self, row: ClaimedRow, now: int) -> int:
        """A message is handed out before its ETA, for workers that show it and wait by themselves."""
        at = None if self._notice else self._runner.due_at(row)
        return 0 if at is None else max(0, at - now)

    def timeout(self, row: ClaimedRow) -> float | None:
        return None if self._notice else self._runner.limits(self._task, row)[0]

    def starting(self, work: Work) -> None:
        seen = self._runner.seen
        if seen is not None:
            if work.verdict is None and seen.is_revoked(work.row):
                work.verdict = Kind.REVOKED
            task = self._runner.app.tasks[self._task]
            work.note = Note(task.time_limit, task.soft_time_limit, seen.events.wants_tasks and task.send_events)
            if signals.task_received.receivers and self._runs(work):
                seen.received(self._runner.request(task, work.row))

    def started(self, work: Work) -> None:
        if self._runner.seen is not None and self._runs(work):
            self._runner.seen.started(self._task, work)

    def _runs(self, work: Work) -> bool:
        """What does not was never received: so Celery's worker has it."""
        return not self._notice and work.verdict is None

    def ended(self, work: Work, report: Any) -> None:
        if report and self._runner.seen is not None:
            self._runner.seen.events.extend(report)

    def run(self, work: Work) -> Outcome:
        verdict = Kind.REVOKED if self._notice else work.verdict
        return self._runner.run(self._task, work, verdict)


class Envelope(_OfApp):
    """Messages that name no task: of task protocol 1, or none of Celery's."""

    opens = True

    def opened(self, row: ClaimedRow) -> tuple[ClaimedRow, ForeignTarget | None]:
        told = as_protocol_2(row, self._runner.app.conf.accept_content)
        return (row, None) if told is None else (told, self._runner.tasks.get(told.target))

    def names(self, row: ClaimedRow) -> Sequence[str]:
        with suppress(Exception):  # it is told when it begins
            row, target = self.opened(row)
            return target.names(row) if target is not None else ()
        return ()


def _not_called(payload: None) -> None: ...


class Note(NamedTuple):
    """What the worker's process tells the slot about a task."""

    hard_limit: float | None
    soft_limit: float | None
    """The task's, which remote control may have changed."""
    told: bool
    """Its end is to be reported as events."""


class Seen(Protocol):
    """Who is told in the worker's process what its slots do (``celery_bridge.control.Control``)."""

    events: Events

    def is_revoked(self, row: ClaimedRow) -> bool: ...
    def received(self, request: Request) -> None: ...
    def started(self, task: str, work: Work) -> None: ...


class Runner:
    """One app in one process."""

    def __init__(self, app: Celery, database: Database, hostname: str, concurrency: int | None = None) -> None:
        self.app, self.database, self.hostname = app, database, hostname
        self.queue: str = app.conf.task_default_queue
        database.ready()
        backend = app.backend
        self.seen: Seen | None = None
        self.tasks: dict[str, AppTask] = {}
        self._backend = backend if isinstance(backend, Backend) else None
        if self._backend is not None:
            results = self._backend.place.database
            results.ready()
            if results.database_id != database.database_id:  # first the result, then the row
                self._backend = None

    @functools.cached_property
    def _accepted(self) -> Any:
        return self.app.conf.accept_content

    def targets(self) -> dict[str, ForeignTarget]:
        found = [AppTask(self, name, notice=notice) for name in self.app.tasks for notice in (False, True)]
        self.tasks = {target.name: target for target in found}
        return {**self.tasks, messages.TARGET: Envelope(self, messages.TARGET)}

    def due_at(self, row: ClaimedRow) -> int | None:
        """As an instant; None: at once. An ETA without a zone is in the app's."""
        at, eta = messages.eta_of(row.head or b"")
        if at is None:
            return None
        return clock.to_instant(maybe_make_aware(maybe_iso8601(eta), self.app.conf.timezone))

    def expires_at(self, row: ClaimedRow) -> int | None:
        """The instant after which it is not to begin."""
        expires = messages.headers_of(row.head or b"").get("expires")
        if expires is None:
            return None
        return clock.to_instant(maybe_make_aware(maybe_iso8601(expires), self.app.conf.timezone))

    def limits(self, task: str, row: ClaimedRow) -> tuple[float | None, float | None]:
        """Hard and soft, in seconds."""
        hard, soft = messages.time_limits_of(row.head or b"")
        known = self.app.tasks[task]
        return hard or known.time_limit, soft or known.soft_time_limit

    # -- one message -------------------------------------------------------------------------------------------------

    def run(self, name: str, work: Work, verdict: Kind | None) -> Outcome:
        row, began = work.row, time.monotonic()
        report = Report()

        def outcome(state: State, kind: Kind | None = None, summary: str | None = None, **more: Any) -> Outcome:
            return Outcome(work, state, kind, summary, time.monotonic() - began, report=report.events, **more)

        task = self.app.tasks[name]
        try:
            request = self.request(task, row)
            request.eventer = report if work.note is not None and work.note.told else None
        except Exception as error:  # not decodable, not allowed, of no task's shape: it can never run
            log.error("message %s of %s cannot be read: %s", work.context.id, name, type(error).__name__)
            if work.note is not None and work.note.told:  # else it runs for ever
                report.send("task-rejected", uuid=row.task_id, requeue=False)
            return outcome(State.BLOCKED, Kind.CORRUPT_PAYLOAD, type(error).__name__)
        ended = _Ended(self.database, self._backend)
        try:
            with ended.recording():
                state, kind, summary, delay = (
                    self._end(task, request, verdict, work) if verdict else self._trace(task, request, work)
                )
        except MemoryError:  # its process had better end
            raise
        except Exception as error:  # beside the task's body: callbacks that are none, a result that nobody takes
            log.error("task %s[%s] cannot be ended: %s", name, work.context.id, type(error).__name__)
            return outcome(State.PENDING, Kind.CRASHED, f"it cannot be ended: {type(error).__name__}")
        if not ended or (kind is Kind.CRASHED and state is State.PENDING):
            return outcome(state, kind, summary, delay=delay)
        settlement = Settlement(row.id, row.token, state, row.queue, kind, summary, delay or 0)
        try:
            with _in_task(task, request):
                fact = ended.write(settlement)
        except (
            Exception
        ) as error:  # refused by the database, or raised by an error callback: again, but not without end
            log.error("the end of task %s[%s] cannot be written: %s", name, request.id, type(error).__name__)
            return outcome(State.PENDING, Kind.CRASHED, f"its end cannot be written: {type(error).__name__}")
        return outcome(state, kind, summary, settled=fact)

    def request(self, task: Any, row: ClaimedRow) -> Request:
        """Raises whatever is wrong with the message."""
        again = row.attempt > 1 or row.lapses > 0
        incoming = messages.incoming(row.head or b"", row.payload, redelivered=again, accept=self._accepted)
        request = Request(incoming, app=self.app, hostname=self.hostname, task=task, connection_errors=())
        _check_shape(request)
        return request

    def _trace(self, task: Any, request: Request, work: Work) -> tuple[State, Kind | None, str | None, int | None]:
        values = request.request_dict
        values.update({"loglevel": None, "logfile": None, "is_eager": False}, **(request._payload[2] or {}))
        try:
            with _limited(self._limits_of(task.name, work)[1]):
                returned, info, runtime, shown = trace_task(
                    task, request.id, request.args, request.kwargs, values, app=self.app, hostname=self.hostname,
                    loader=self.app.loader,
                )  # fmt: skip
        except Reject as rejected:
            return self._rejected(request, work.row, rejected)
        except (SystemExit, KeyboardInterrupt) as error:  # Celery's worker takes it for a lost child, and so do we
            return State.PENDING, Kind.CRASHED, type(error).__name__, None
        except BaseException as error:
            request.on_failure(_info_of(error))
            return State.DEAD, Kind.FAILED, type(error).__name__, None
        if info is None:
            request.send_event("task-succeeded", result=shown, runtime=runtime)
            return State.SUCCEEDED, None, None, None
        if info.state == states.RETRY:
            trace = str(returned.traceback)
            request.send_event("task-retried", exception=saferepr(info.retval.exc), traceback=trace)
            return State.ACKED, None, None, None
        if info.state == states.IGNORED:
            return State.ACKED, None, None, None
        if info.state == states.REJECTED:
            return self._rejected(request, work.row, info.retval)
        _tell_failure(request, returned)
        return State.DEAD, Kind.FAILED, type(info.retval).__name__, None

    def _limits_of(self, task: str, work: Work) -> tuple[float | None, float | None]:
        """In a slot: as the call said them, or as the worker's process has them."""
        if work.note is None:
            return self.limits(task, work.row)
        hard, soft = messages.time_limits_of(work.row.head or b"")
        return hard or work.note.hard_limit, soft or work.note.soft_limit

    def _rejected(
        self, request: Request, row: ClaimedRow, rejected: Reject
    ) -> tuple[State, Kind | None, str | None, int | None]:
        if rejected.requeue:
            request.send_event("task-rejected", requeue=True)
            put_back = ledger.requeued(row, 0)  # as every consumer puts it back: one that nobody takes must wait
            return put_back.state, put_back.kind, None, put_back.delay
        request.on_failure(_info_of(rejected))
        return State.DEAD, Kind.REJECTED, None, None

    def _end(
        self, task: Any, request: Request, verdict: Kind, work: Work
    ) -> tuple[State, Kind | None, str | None, int | None]:
        """Tells how a task ended that ran no more, or never."""
        if verdict is Kind.REVOKED:
            killed = work.signal is not None
            request._announce_revoked("terminated" if killed else "revoked", killed, work.signal, False)
            if work.row.task_id is None:  # a notice; the record of its task has ended before
                return State.ACKED, None, None, None
            return State.CANCELLED, Kind.REVOKED, None, None
        if verdict is Kind.EXPIRED:
            request._announce_revoked("expired", False, None, True)
            return State.CANCELLED, Kind.EXPIRED, None, None
        if verdict is Kind.TIMEOUT:
            request.on_timeout(False, self._limits_of(task.name, work)[0])
            return State.DEAD, Kind.TIMEOUT, TimeLimitExceeded.__name__, None
        error = WorkerLostError(f"Its process died in each of {CRASHES} attempts.")
        task.backend.mark_as_failure(request.id, error, request=request._context, store_result=request.store_errors)
        signals.task_failure.send(
            sender=task, task_id=request.id, exception=error, args=request.args, kwargs=request.kwargs, traceback=None,
            einfo=_info_of(error),
        )  # fmt: skip
        _tell_failure(request, _info_of(error))
        return State.DEAD, Kind.CRASHED, WorkerLostError.__name__, None


def _check_shape(request: Request) -> None:
    """Anybody may have written the message. What Celery trips over beside the task's body, and tells nobody, is raised here."""
    _, kwargs, embed = request._payload
    if not isinstance(kwargs, dict) or not isinstance(embed or {}, dict):
        raise InvalidTaskError("keyword arguments and what comes with them must be mappings")
    hash((request.id, *request.stamps))


def _tell_failure(request: Request, info: ExceptionInfo) -> None:
    """As Celery's worker does it when it hears of a failure from one of its children."""
    if request.eventer is not None:
        error = getattr(info.exception, "exc", info.exception)
        shown = saferepr(get_pickled_exception(error))
        request.send_event("task-failed", exception=shown, traceback=str(info.traceback))


class _Ended:
    """What the end of one task comes to, recorded until it is written in one transaction."""

    def __init__(self, database: Database, backend: Backend | None) -> None:
        self._database, self._backend = database, backend
        self.record = Record()

    def __bool__(self) -> bool:
        return bool(self.record.entries)

    @contextmanager
    def recording(self) -> Iterator[None]:
        database_id = self._database.database_id
        into = nullcontext(self.record) if self._backend is None else self._backend.recording()
        with into as self.record, self.record.publishing(database_id):
            token = _ending.set((self.record, database_id))
            try:
                yield
            finally:
                _ending.reset(token)

    def write(self, settlement: Settlement) -> Fact:
        """Ends the row and writes the rest, or nothing of both: LOST, if the claim is somebody else's by now."""
        dialect, pause = self._database.dialect, BUSY_FIRST
        until = time.monotonic() + SETTLE_PATIENCE
        while True:
            try:
                with self._database.transaction() as session:
                    fact = dialect.settle(session, [settlement])[0]
                    # ALREADY: the answer to our first COMMIT was lost, and it wrote all of it.
                    if fact in (Fact.DONE, Fact.AGAIN):
                        self._apply(session)
                if fact is not Fact.BUSY:
                    return fact
            except (ConnectionLost, DatabaseBusy) as error:
                log.warning("the end of a task is not written yet: %s", type(error).__name__)
            if time.monotonic() >= until:
                return Fact.LOST
            time.sleep(pause)
            pause = min(pause * 2, BUSY_MOST)

    def _apply(self, session: OwnSession) -> None:
        if self._backend is not None:
            self._backend.apply(session, self.record)
            return
        for entry in self.record.entries:  # without a backend of ours, these are messages
            self._database.dialect.enqueue(session, entry)  # type: ignore[arg-type]


_ending: ContextVar[tuple[Record, str] | None] = ContextVar("dbqueue_celery_end", default=None)
"""Where the end of the task that runs is recorded, and of which database."""


def _body(run: Callable[..., Any]) -> Callable[..., Any]:
    """What a task's body publishes goes out at once, and its soft limit holds for the body alone: what comes after it is ours."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        with recorded.apart():
            if not _soft.get():
                return run(*args, **kwargs)
            with _soft_limit():
                return run(*args, **kwargs)

    return call


def _belongs_to_the_end(method: Callable[..., Any]) -> Callable[..., Any]:
    """But its retry and its replacement are how it ends."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        ending = _ending.get()
        if ending is None:
            return method(*args, **kwargs)
        record, database_id = ending
        with record.publishing(database_id):
            return method(*args, **kwargs)

    return call


@contextmanager
def _in_task(task: Any, request: Request) -> Iterator[None]:
    """What is published is a child of this task, as Celery's tracer has it: the body of a chord, its error callbacks."""
    _task_stack.push(task)
    task.push_request(request.request_dict, called_directly=False, args=request.args, kwargs=request.kwargs)
    try:
        yield
    finally:
        task.pop_request()
        _task_stack.pop()


_soft: ContextVar[float | None] = ContextVar("dbqueue_celery_soft_limit", default=None)
"""Of the next body that begins, in seconds: the task's own, and not that of one which it calls."""


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    token = _soft.set(seconds)
    try:
        yield
    finally:
        _soft.reset(token)


@contextmanager
def _soft_limit() -> Iterator[None]:
    """Raises SoftTimeLimitExceeded in the task; only where it runs on the main thread, as in child processes."""
    seconds = _soft.get()
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    _soft.set(None)

    def over(number: int, frame: Any) -> None:
        raise SoftTimeLimitExceeded(seconds)

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _info_of(error: BaseException) -> ExceptionInfo:
    try:
        raise error
    except BaseException:
        return ExceptionInfo()


# -- the app in a process ----------------------------------------------------------------------------------------------

_targets: dict[str, ForeignTarget] = {}


def find(name: str) -> ForeignTarget | None:
    """The target of a name in this child process."""
    return _targets.get(name)


def set_up_child(spec: str, hostname: str, setup: Callable[[], None]) -> None:
    """As Celery's prefork pool sets up one of its children."""
    setup()
    app, queue = apps.find_celery(spec), apps.find_queue(spec)
    assert app is not None  # the parent has found it
    prepare(app, hostname)
    for fixup in getattr(
        app, "_fixups", ()
    ):  # Django's keeps its connections in order, from the worker's own signal on
        if hasattr(fixup, "on_worker_init"):
            fixup.on_worker_init(sender=_ChildsWorker(app, hostname))
    worker_state.reset_state()
    _targets.update(Runner(app, queue.database, hostname).targets())
    signals.worker_process_init.send(sender=hostname)


def tear_down_child(hostname: str) -> None:
    """Of one that ends without force: at the worker's end, after so many tasks, or as one too many."""
    signals.worker_process_shutdown.send(sender=hostname, pid=os.getpid(), exitcode=0)


@dataclass(frozen=True)
class _ChildsWorker:
    """What Celery's fixups ask of the worker whose child this is."""

    app: Celery
    hostname: str
    pool_cls: str = "prefork"


def prepare(app: Celery, hostname: str) -> None:
    """Makes the app's tasks ready to be traced in this process."""
    _set_task_join_will_block(True)
    app.loader.init_worker()
    app.loader.init_worker_process()
    setup_worker_optimizations(app, hostname)
    if not hasattr(Task.retry, "__wrapped__"):
        for method in ("retry", "replace", "on_replace"):
            if hasattr(Task, method):
                setattr(Task, method, _belongs_to_the_end(getattr(Task, method)))
    for name, task in app.tasks.items():
        task.run = _body(task.run)
        if task_has_custom(task, "__call__") and not hasattr(type(task).__call__, "__wrapped__"):
            type(task).__call__ = _body(type(task).__call__)
        task.__trace__ = build_tracer(name, task, app.loader, hostname, app=app)


def node_name(name: str | None) -> str:
    """As Celery names its nodes, but ``dbqueue@host`` where nothing is said: both kinds may run on one host. Of those that one command
    starts (``--processes``) the second is ``dbqueue-2@host``, and so on: two of one name would share a mailbox."""
    first, _, host = default_nodename(name or "", "dbqueue").partition("@")
    place = os.environ.get(PLACE, "1")
    return f"{first}@{host}" if place == "1" else f"{first}-{place}@{host}"


class Served:
    """What a Celery app brings to a worker of ours, in the worker's own process: targets, queues, how a child is set up."""

    def __init__(
        self,
        app: Celery,
        spec: str,
        queue: DBQueue,
        name: str | None,
        queues: Sequence[str] | None,
        setup: Callable[[], None],
    ) -> None:
        app.loader.init_worker()  # imports what the app says
        app.finalize()
        self.app = app
        self.hostname = hostname = node_name(name)
        self.imports = (__name__,)
        """What each child needs besides the app; imported once, before they are forked."""
        self._idle = IdleSessions(queue.database)  # what is asked at the start is asked once
        self.runner = Runner(app, queue.database, hostname)
        self.targets = self.runner.targets()
        self.queues = (*_declared(app, queues), *sorted({t.policy.queue for t in queue.targets.values() if not queues}))
        self.set_up_child = functools.partial(set_up_child, spec, hostname, setup)
        self.tear_down_child = functools.partial(tear_down_child, hostname)
        self.concurrency: int = app.conf.worker_concurrency or os.cpu_count() or 1
        self.max_jobs: int | None = app.conf.worker_max_tasks_per_child
        self.max_memory: int | None = app.conf.worker_max_memory_per_child

    @contextmanager
    def seen(self, worker: Worker, *, task_events: bool) -> Iterator[None]:
        """While the worker runs: it tells what it does, and can be asked and steered by remote control."""
        control = self.runner.seen = Control(self.app, self.hostname, worker, task_events=task_events)
        end = events.subscribe(control.hear, but=(events.JobStarted, events.JobEnded))
        try:
            yield
        finally:
            end()
            control.stop()
            self._idle.close()

    @contextmanager
    def serving(self, *, threads: bool) -> Iterator[None]:
        """While the worker runs: Celery's signals of a worker. ``threads``: tasks are traced in this process."""
        self.pool_cls = "threads" if threads else "prefork"
        signals.worker_init.send(sender=self)
        if limited := sorted(task.name for task in self.app.tasks.values() if task.rate_limit):
            log.warning("this worker keeps no rate limits, and these tasks have one: %s", ", ".join(limited))
        if threads:
            prepare(self.app, self.hostname)
            if any(task.time_limit for task in self.app.tasks.values()):
                log.warning("some tasks have a hard time limit, which threads cannot keep: -P processes ends them")
        end = events.subscribe(self._tell, but=(events.JobStarted, events.JobEnded))
        try:
            yield
        finally:
            end()

    def _tell(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerStarted):
            signals.worker_ready.send(sender=self)
        elif isinstance(event, events.WorkerStopping):
            signals.worker_shutting_down.send(sender=self.hostname, sig=event.reason, how="warm", exitcode=0)
        elif isinstance(event, events.WorkerStopped):
            signals.worker_shutdown.send(sender=self)


def _declared(app: Celery, names: Sequence[str] | None) -> tuple[str, ...]:
    """The queues to consume from, declared with their bindings as Celery's worker declares them."""
    if names:
        app.amqp.queues.select(names)
    chosen = dict(app.amqp.queues.consume_from)
    with app.connection_for_write() as connection:
        for queue in chosen.values():
            queue(connection.default_channel).declare()
    return tuple(chosen)
