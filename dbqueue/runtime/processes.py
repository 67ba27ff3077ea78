"""Process slots: each job runs in the main thread of a child, which can be killed.

At its timeout a job's child is killed, and another one takes its place. A child whose claim was lost is told so, and killed at its
timeout at the latest.
A child that dies costs its own job one attempt (or what ``on_crash`` says) and nothing else: the parent holds the lease and settles at
once, without waiting for it to end.

The children are forked from a clean server process without threads and connections (multiprocessing's forkserver), which has
imported the application once; where there is no fork they are started afresh. They never see the queue's claims. If the parent dies,
they end at once: nobody would renew their lease.

One thread of the parent does all the talking, so that a child that does not read can never block the worker's loop.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar
from uuid import UUID

from dbqueue import ids
from dbqueue.database.tables import ClaimedRow
from dbqueue.errors import ConfigError
from dbqueue.runtime.context import JobContext
from dbqueue.runtime.execute import Outcome, Work, execute
from dbqueue.states import Kind, State
from dbqueue.targets import Target

log = logging.getLogger("dbqueue")

START_TRIES = 3
"""So many children in a row that die before they are ready mean that none will ever be."""
STOP_PATIENCE = 2.0


@dataclass(frozen=True)
class ChildOptions:
    """``imports``: modules that a child imports first, the application's own. ``setup`` is called in each child before that (logging);
    it must be importable. ``max_jobs`` and ``max_memory`` (KiB of resident memory): a child is replaced after its job."""

    imports: tuple[str, ...] = ()
    setup: Callable[[], None] | None = None
    max_jobs: int | None = None
    max_memory: int | None = None


@dataclass(eq=False)
class Child:
    process: Any
    connection: Connection
    ready: bool = False
    work: Work | None = None
    started_at: float = 0.0
    jobs: int = 0
    memory: int = 0
    leaving: bool = False


@dataclass(frozen=True)
class Order:
    """One job on its way to a child."""

    module: str
    attribute: str
    target: str
    job_id: UUID
    attempt: int
    max_attempts: int
    payload: bytes


@dataclass(frozen=True)
class Answer:
    state: State
    kind: Kind | None
    summary: str | None
    duration: float
    delay: int | None
    noticed: bool
    memory: int


@dataclass(eq=False)
class ProcessSlots:
    """The slots of a worker, as ``ThreadSlots`` gives them; only the loop calls its methods."""

    size: int
    ring: Callable[[], None]
    options: ChildOptions = field(default_factory=ChildOptions)
    kills: ClassVar[bool] = True
    abandoned: int = 0
    broken: str | None = None
    """Why no child can be had; the worker ends."""

    def __post_init__(self) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(["dbqueue.runtime.processes", *self.options.imports])
        self._children: list[Child] = []
        self._done: deque[Outcome] = deque()
        self._orders: deque[tuple[Child, Any]] = deque()
        self._lock = threading.Lock()
        self._failures = 0
        self._closing = False
        self._bell, self._bell_end = self._context.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._serve, name="dbqueue-children", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> int:
        return sum(child.work is not None for child in self._children)

    @property
    def idle(self) -> int:
        with self._lock:
            return sum(child.ready and child.work is None and not child.leaving for child in self._children)

    def start(self, work: Work) -> bool:
        """Only while ``idle`` is positive. False: the child died meanwhile; the job was not started."""
        target = work.target
        assert target is not None
        with self._lock:
            child = next((c for c in self._children if c.ready and c.work is None and not c.leaving), None)
            if child is None:
                return False
            child.work, child.started_at = work, time.monotonic()
        row = work.row
        order = Order(*address(target), target.name, work.context.id, row.attempt, row.max_attempts, row.payload)
        work.context.on_cancel = lambda: self._tell(child, "cancel")
        self._tell(child, order)
        return True

    def collect(self) -> list[Outcome]:
        outcomes = []
        while self._done:
            outcomes.append(self._done.popleft())
        return outcomes

    def abandon(self, work: Work) -> None:
        """Kills the child; another one takes its place."""
        work.abandoned = True
        with self._lock:
            child = next((c for c in self._children if c.work is work), None)
        if child is not None:
            child.process.kill()

    def close(self, patience: float) -> bool:
        """Ends the children: idle ones when they read it, busy ones by force. No process is left behind."""
        self._closing = True
        self._ring_bell()
        self._thread.join(patience + STOP_PATIENCE)
        for child in self._children:
            child.process.kill()
            child.process.join(STOP_PATIENCE)
        return not self._thread.is_alive()

    # -- the thread that talks to the children -----------------------------------------------------------------------

    def _tell(self, child: Child, message: Any) -> None:
        self._orders.append((child, message))
        self._ring_bell()

    def _ring_bell(self) -> None:
        self._bell_end.send_bytes(b"!")

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._fill()
                for reader in wait([self._bell, *(c.connection for c in self._children)]):
                    if reader is self._bell:
                        self._bell.recv_bytes()
                    else:
                        self._hear(next(c for c in self._children if c.connection is reader))
                self._deliver()
            for child in self._children:
                if child.work is None:
                    self._send(child, None)
                else:
                    child.process.kill()
        except BaseException as error:
            self.broken = f"{type(error).__name__} in the thread of the children"
            log.exception("the thread that talks to the children ended")
            self.ring()

    def _fill(self) -> None:
        while len(self._children) < self.size and self.broken is None:
            ours, theirs = self._context.Pipe(duplex=True)
            process = self._context.Process(target=serve_child, args=(theirs, self.options), daemon=True)
            process.start()
            theirs.close()
            with self._lock:
                self._children.append(Child(process, ours))

    def _deliver(self) -> None:
        while self._orders:
            child, message = self._orders.popleft()
            if child in self._children and (message != "cancel" or child.work is not None):
                self._send(child, message)

    def _send(self, child: Child, message: Any) -> None:
        with suppress(OSError):  # it died; its end is heard in a moment
            child.connection.send(message)

    def _hear(self, child: Child) -> None:
        try:
            answer = child.connection.recv()
        except (EOFError, OSError):
            self._bury(child)
            return
        if answer == "ready":
            self._failures = 0
            child.ready = True
        else:
            self._ended(child, answer)
        self.ring()

    def _ended(self, child: Child, answer: Answer) -> None:
        work, child.work = child.work, None
        child.jobs += 1
        if work is not None and not work.abandoned:
            work.context.noticed = answer.noticed
            self._done.append(Outcome(work, answer.state, answer.kind, answer.summary, answer.duration, answer.delay))
        most, memory = self.options.max_jobs, self.options.max_memory
        if (most is not None and child.jobs >= most) or (memory is not None and answer.memory > memory):
            child.leaving = True
            self._send(child, None)

    def _bury(self, child: Child) -> None:
        """Its end of the pipe is closed: it died, or left as it was told to."""
        with self._lock:
            self._children.remove(child)
        child.connection.close()
        child.process.join(STOP_PATIENCE)
        code, work = child.process.exitcode, child.work
        if work is not None and not work.abandoned:
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            duration = time.monotonic() - child.started_at
            self._done.append(Outcome(work, State.PENDING, Kind.CRASHED, f"its process ended: {how}", duration))
        if not child.ready:
            self._failures += 1
            if self._failures >= START_TRIES:
                self.broken = f"{self._failures} child processes ended before they were ready (exit code {code})"
        self.ring()


def address(target: Target[Any]) -> tuple[str, str]:
    """Where a child finds a target: its handler's module and name. A target that stands nowhere cannot run in a child."""
    module, attribute = target.handler.__module__, target.handler.__qualname__
    if "<locals>" in attribute:
        raise ConfigError(
            f"target {target.name!r} is declared inside a function, where a child process cannot find it; declare it at module level, "
            "or use thread slots (-P threads)"
        )
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name if spec else module
    return module, attribute


# -- in the child ------------------------------------------------------------------------------------------------------


def serve_child(connection: Connection, options: ChildOptions) -> None:
    """The child's life: import the application, then one job after the other until the parent says or ends."""
    # Daemonic, so that the parent's exit never waits for it; but its jobs may have children of their own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or a service manager signals the whole group; the parent decides what becomes of the jobs.
        signal.signal(number, signal.SIG_IGN)
    if options.setup is not None:
        options.setup()
    for module in options.imports:
        importlib.import_module(module)
    inbox: deque[Order] = deque()
    arrived, current = threading.Semaphore(0), Current()
    threading.Thread(target=_listen, args=(connection, inbox, arrived, current), daemon=True).start()
    connection.send("ready")
    while True:
        arrived.acquire()
        if not inbox:  # told to leave
            logging.shutdown()
            os._exit(0)
        connection.send(_run(inbox.popleft(), current))


@dataclass(eq=False)
class Current:
    context: JobContext | None = None


def _listen(connection: Connection, inbox: deque[Order], arrived: threading.Semaphore, current: Current) -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, and with it whoever renews our lease
        if message == "cancel":
            if current.context is not None:
                current.context.cancel()
            continue
        if message is not None:
            current.context = JobContext(message.job_id, message.target, message.attempt, message.max_attempts)
            inbox.append(message)
        arrived.release()


def _run(order: Order, current: Current) -> Answer:
    assert current.context is not None
    found: Any = None
    with suppress(ImportError, AttributeError):
        found = importlib.import_module(order.module)
        for name in order.attribute.split("."):
            found = getattr(found, name)
    if not isinstance(found, Target) or found.name != order.target:
        return Answer(State.BLOCKED, Kind.UNKNOWN_TARGET, None, 0.0, None, False, 0)
    row = ClaimedRow(
        order.job_id.bytes, ids.ZERO, None, order.target, None, order.payload, None, "", 0, 0, order.attempt, 0, order.max_attempts,
        None, 0, 0,
    )  # fmt: skip
    outcome = execute(Work(row, found, current.context))
    return Answer(
        outcome.state,
        outcome.kind,
        outcome.summary,
        outcome.duration,
        outcome.delay,
        current.context.noticed,
        memory_kib(),
    )


def memory_kib() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    except (OSError, ValueError):
        return 0
