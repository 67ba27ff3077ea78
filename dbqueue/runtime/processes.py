"""Process slots: each job runs in the main thread of a child, which can be killed.

At its timeout a job's child is killed, with the processes that the job started, and another one takes its place. A child whose claim
was lost is told so, and killed at its timeout at the latest.
A child that dies costs its own job one attempt (or what ``on_crash`` says) and nothing else: the parent holds the lease and settles at
once, without waiting for it to end. A job that the dead child had not read yet is handed back.

The children are forked from a clean server process without threads and connections (multiprocessing's forkserver, see ``preload``),
which has imported the application once; where there is no fork they are started afresh. They never see the queue's claims. If the
parent dies, they end at once: nobody would renew their lease.

The worker's loop talks to the children itself, and a child's main thread to the loop: each thread between them would cost a short job
more than all the rest. The loop never waits for a child: orders are written as their pipe takes them, and answers read as far as they
have come. What takes long, starting children and seeing them end, is done by a thread beside it. An end is seen by the process itself,
as a job's own children may hold the pipes open.
"""

from __future__ import annotations

import atexit
import contextvars
import fcntl
import importlib
import logging
import multiprocessing
import os
import pickle
import selectors
import signal
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, BinaryIO, ClassVar

from msgspec import Struct
from msgspec.structs import astuple

from dbqueue import ids
from dbqueue.database.tables import ClaimedRow, Fact
from dbqueue.errors import ConfigError, QueueError
from dbqueue.outbox import PREFIX
from dbqueue.runtime.context import JobContext
from dbqueue.runtime.deliver import OutboxTarget
from dbqueue.runtime.execute import ForeignTarget, Outcome, Work, execute
from dbqueue.states import Kind, State
from dbqueue.targets import Target

log = logging.getLogger("dbqueue")

START_TRIES = 3
"""So many children in a row that die before they are ready mean that none will ever be."""
STOP_PATIENCE = 2.0
LENGTH = struct.Struct("=I")
"""Before each answer of a child, since it is read in pieces."""
MOUTHFUL = 65_536
LEAVE = pickle.dumps(None)


@dataclass(frozen=True)
class ChildOptions:
    """``imports``: modules that a child imports first, the application's own. ``setup`` is called in each child before that (logging), and
    ``teardown`` in each that ends without force; they must be importable. ``max_jobs`` and ``max_memory`` (KiB of resident memory): a
    child is replaced after its job."""

    imports: tuple[str, ...] = ()
    setup: Callable[[], None] | None = None
    max_jobs: int | None = None
    max_memory: int | None = None
    teardown: Callable[[], None] | None = None


@dataclass(eq=False)
class Child:
    process: Any
    orders: Connection
    """Not blocking; ``outbox`` is what it did not take yet."""
    words: Connection
    """Not blocking: the claims that are cancelled, to be heard while their jobs run."""
    answers: Connection
    """Not blocking; ``inbox`` is what came of an answer that is not whole yet."""
    outbox: bytearray = field(default_factory=bytearray)
    inbox: bytearray = field(default_factory=bytearray)
    ready: bool = False
    work: Work | None = None
    started_at: float = 0.0
    jobs: int = 0
    leaving: bool = False
    """It gets no job any more."""
    gone: bool = False
    """Its process has ended, and its number may be another's."""
    failure: str | None = None
    """Why it did not become ready."""

    def kill(self) -> None:
        """With everything that its job started, unless that left the child's process group."""
        if self.gone:
            return
        with suppress(OSError):  # it has not made its group yet, or is gone
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError):
            self.process.kill()

    @property
    def began(self) -> bool:
        unread = bytearray(4)
        with suppress(OSError):
            fcntl.ioctl(self.orders.fileno(), termios.FIONREAD, unread)
        return not int.from_bytes(unread, sys.byteorder) and not self.outbox


class Order(Struct, frozen=True, gc=False):
    """One job on its way to a child. Orders and answers travel as plain tuples: pickling an object of ours costs eight times as much."""

    module: str
    attribute: str
    target: str
    job_id: bytes
    claim: bytes
    """Its token. An attempt that was handed back is claimed as the same attempt again, so nothing less tells two claims apart."""
    attempt: int
    max_attempts: int
    payload: bytes
    row: ClaimedRow | None = None
    """Whole, for a foreign target."""
    verdict: Kind | None = None
    signal: int | None = None
    note: Any = None

    def packed(self) -> bytes:
        row = None if self.row is None else astuple(self.row)
        return pickle.dumps((*astuple(self)[:8], row, self.verdict, self.signal, self.note))

    @staticmethod
    def unpacked(told: Sequence[Any]) -> Order:
        fields = list(told)
        if fields[8] is not None:
            fields[8] = ClaimedRow(*fields[8])
        return Order(*fields)


class Answer(Struct, frozen=True, gc=False):
    state: int
    kind: Kind | None
    summary: str | None
    duration: float
    delay: int | None
    noticed: bool
    payload: bytes | None = None
    settled: Fact | None = None
    report: Any = None
    memory: int = 0


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a delivery."""

    claim: bytes


@dataclass(frozen=True)
class Ready:
    """``failure``: why it is not, and ends."""

    failure: str | None = None


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
            self._context.set_forkserver_preload(["dbqueue.runtime.preload"])
        self._children: list[Child] = []
        self._ended: deque[Child] = deque()
        """Children whose process is gone, for the loop."""
        self._done: deque[Outcome] = deque()
        self._lock = threading.Lock()
        """Guards the list of children, which of them has which work, and that their pipes are open."""
        self._failures = 0
        self._closing = False
        self._bell, self._bell_end = os.pipe()
        os.set_blocking(self._bell_end, False)
        self._pipes: Any = selectors.DefaultSelector()
        """The loop's; an epoll or kqueue, which a wait for other files can include."""
        self.files: tuple[int, ...] = (self._pipes.fileno(),)
        self._processes = selectors.DefaultSelector()
        """The thread's."""
        self._processes.register(self._bell, selectors.EVENT_READ)
        # multiprocessing waits at exit for children that it has only asked to end, and ours do not listen to that.
        atexit.register(self._kill_all)
        self._thread = threading.Thread(target=self._keep, name="dbqueue-children", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> int:
        with self._lock:
            return sum(child.work is not None for child in self._children)

    @property
    def idle(self) -> int:
        with self._lock:
            return sum(_is_idle(child) for child in self._children)

    def processes(self) -> dict[int, Work | None]:
        """The children, by process id, and what each works on. From any thread."""
        with self._lock:
            return {child.process.pid: child.work for child in self._children}

    def start(self, work: Work) -> bool:
        """Only while ``idle`` is positive. False: the child died meanwhile; the job was not started."""
        target = work.target
        assert target is not None
        row = work.row
        if isinstance(target, ForeignTarget):
            order = Order(
                *target.address,
                target.name,
                row.id,
                row.token,
                row.attempt,
                row.max_attempts,
                b"",
                row,
                work.verdict,
                work.signal,
                work.note,
            )
        else:
            order = Order(*address(target), target.name, row.id, row.token, row.attempt, row.max_attempts, row.payload)
        with self._lock:
            child = next((child for child in self._children if _is_idle(child)), None)
            if child is None:
                return False
            child.work, child.started_at = work, time.monotonic()
        work.context.on_cancel = partial(self._tell, child, row)
        self._send(child, order.packed())
        return True

    def resize(self, size: int) -> None:
        """More children, or fewer: idle ones leave now; if these are not enough, those whose jobs end next."""
        leaving = []
        with self._lock:
            self.size = size
            for child in self._children:
                if child.work is None and not child.leaving and self._too_many:
                    child.leaving = True
                    leaving.append(child)
        for child in leaving:
            self._send(child, LEAVE)
        self._ring_bell()

    @property
    def _too_many(self) -> bool:
        """With the lock held."""
        return len(self._children) > self.size and sum(not child.leaving for child in self._children) > self.size

    def collect(self) -> list[Outcome]:
        for key, _ in self._pipes.select(0):
            child, attend = key.data
            if child in self._children:
                attend(child)
        while self._ended:
            self._bury(self._ended.popleft())
        outcomes = []
        while self._done:
            outcomes.append(self._done.popleft())
        return outcomes

    def abandon(self, work: Work) -> None:
        """Kills the child; another one takes its place."""
        with self._lock:
            work.abandoned = True
            child = next((c for c in self._children if c.work is work), None)
            if child is not None:
                child.leaving = True  # the job may end at this very moment, and its child must not get another one
                child.kill()

    def close(self, patience: float) -> bool:
        """Ends the children, busy ones by force. No process is left behind."""
        self._closing = True
        self._ring_bell()
        self._thread.join(patience + STOP_PATIENCE)
        ended = not self._thread.is_alive()
        if ended:
            self._end_all()
            atexit.unregister(self._kill_all)
        else:
            self._kill_all()
        return ended

    def _kill_all(self) -> None:
        with self._lock:
            children = list(self._children)
        for child in children:
            child.kill()
            child.process.join(STOP_PATIENCE)

    def _end_all(self) -> None:
        """Idle children may end by themselves within a moment, as they are told to."""
        with self._lock:
            children, self._children[:] = list(self._children), []
        for child in children:
            if child.work is not None or not child.ready:
                child.kill()
            else:
                self._send(child, LEAVE)
        until = time.monotonic() + STOP_PATIENCE / 4
        for child in children:
            child.process.join(max(0.0, until - time.monotonic()))
            child.kill()
            child.process.join(STOP_PATIENCE)
            self._forget(child)
        self._pipes.close()
        self._processes.close()
        os.close(self._bell)
        bell_end, self._bell_end = self._bell_end, -1
        os.close(bell_end)

    # -- talking to the children, in the loop ------------------------------------------------------------------------

    def _tell(self, child: Child, row: ClaimedRow) -> None:
        """From any thread: its job is cancelled. So short a message goes into the pipe as a whole, or not at all: then its child reads
        nothing any more."""
        with self._lock:
            if child in self._children and child.work is not None and child.work.row is row:
                with suppress(OSError):
                    os.write(child.words.fileno(), pickle.dumps(row.token))

    def _send(self, child: Child, message: bytes) -> None:
        child.outbox += message
        self._flush(child)

    def _flush(self, child: Child) -> None:
        """Writes what the pipe takes without waiting; the rest when it has room."""
        try:
            while child.outbox:
                del child.outbox[: os.write(child.orders.fileno(), child.outbox)]
        except BlockingIOError:
            if child.orders not in self._pipes.get_map():
                self._pipes.register(child.orders, selectors.EVENT_WRITE, (child, self._flush))
            return
        except OSError:  # it died; that is heard in a moment
            pass
        if child.orders in self._pipes.get_map():
            self._pipes.unregister(child.orders)

    def _hear(self, child: Child) -> None:
        """Takes what it has said by now."""
        try:
            while said := os.read(child.answers.fileno(), MOUTHFUL):
                child.inbox += said
                while (answer := _whole(child.inbox)) is not None:
                    self._answered(child, answer)
                if len(said) < MOUTHFUL:
                    return
        except BlockingIOError:
            return
        except Exception as error:
            log.debug("a child process does not talk as it should: %s", type(error).__name__)
        # It ends, or is of no use: its process is seen to end.
        self._pipes.unregister(child.answers)
        if child.work is not None or not child.leaving:
            child.kill()

    def _answered(self, child: Child, answer: Any) -> None:
        if isinstance(answer, tuple):
            self._take(child, Answer(*answer))
        elif isinstance(answer, Beat):
            self._beaten(child, answer)
        elif answer.failure is None:
            self._failures, child.ready = 0, True
        else:
            child.failure = answer.failure

    @staticmethod
    def _beaten(child: Child, beat: Beat) -> None:
        """It may come from a thread that outlived its job."""
        work = child.work
        if work is not None and work.row.token == beat.claim:
            work.context.beat()

    def _take(self, child: Child, answer: Answer) -> None:
        most, memory = self.options.max_jobs, self.options.max_memory
        with self._lock:
            work, child.work = child.work, None
            child.jobs += 1
            worn = (most is not None and child.jobs >= most) or (memory is not None and answer.memory > memory)
            if worn or self._too_many:
                child.leaving = True
        if work is not None and not work.abandoned:
            work.context.noticed = answer.noticed
            a = answer
            self._done.append(
                Outcome(work, State(a.state), a.kind, a.summary, a.duration, a.delay, a.payload, a.settled, a.report)
            )
        if child.leaving:
            self._send(child, LEAVE)

    def _bury(self, child: Child) -> None:
        """Its process is gone: it died, or left as it was told to."""
        if child.answers in self._pipes.get_map():
            self._hear(child)  # what it said before
        with self._lock:
            if child not in self._children:
                return
            self._children.remove(child)
            work = child.work
            code = child.process.exitcode
            if work is not None and not work.abandoned:
                how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
                duration = time.monotonic() - child.started_at
                kind, summary = (Kind.CRASHED, f"its process ended: {how}") if child.began else (Kind.RELEASED, None)
                self._done.append(Outcome(work, State.PENDING, kind, summary, duration))
            self._forget(child)
        if not child.ready:
            self._failed(child.failure or f"child processes end before they are ready (exit code {code})")
        self._ring_bell()

    def _forget(self, child: Child) -> None:
        for file in (child.orders, child.answers):
            with suppress(KeyError, ValueError):
                self._pipes.unregister(file)
        for pipe in (child.orders, child.words, child.answers):
            pipe.close()

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= START_TRIES and self.broken is None:
            self.broken = why

    # -- the thread that starts children and sees them end -------------------------------------------------------------

    def _ring_bell(self) -> None:
        with suppress(OSError):  # full, so it is heard anyway; or closed, so there is nobody to hear it
            os.write(self._bell_end, b"!")

    def _keep(self) -> None:
        try:
            while not self._closing:
                self._fill()
                for key, _ in self._processes.select():
                    if key.data is None:
                        os.read(self._bell, 4096)
                    else:
                        self._see_the_end_of(key.data)
        except BaseException as error:
            self.broken = f"{type(error).__name__} in the thread of the children"
            log.exception("the thread of the children ended")
        finally:
            self.ring()

    def _fill(self) -> None:
        while len(self._children) < self.size and self.broken is None and not self._closing:
            pipes = [self._context.Pipe(duplex=False) for _ in range(3)]
            (orders, orders_end), (words, words_end), (answers_end, answers) = pipes
            process = self._context.Process(
                target=serve_child, args=(orders, words, answers, self.options), daemon=True
            )
            os.environ["_DBQUEUE_PRELOAD"] = ",".join(self.options.imports)
            try:
                process.start()
            except (OSError, EOFError) as error:
                for end in (orders_end, words_end, answers_end):
                    end.close()
                self._failed(f"no child process can be started: {type(error).__name__}: {error}")
                continue
            finally:
                del os.environ["_DBQUEUE_PRELOAD"]
                for end in (orders, words, answers):
                    end.close()
            for end in (orders_end, words_end, answers_end):
                os.set_blocking(end.fileno(), False)
            child = Child(process, orders_end, words_end, answers_end)
            with self._lock:
                self._children.append(child)
            self._processes.register(process.sentinel, selectors.EVENT_READ, child)
            self._pipes.register(answers_end, selectors.EVENT_READ, (child, self._hear))

    def _see_the_end_of(self, child: Child) -> None:
        self._processes.unregister(child.process.sentinel)
        if child.work is not None or not child.leaving:
            child.kill()
        child.process.join(STOP_PATIENCE)
        child.gone = True
        self._ended.append(child)
        self.ring()


def _whole(inbox: bytearray) -> Any:
    """Takes the first message out, if all of it is there; else None."""
    if len(inbox) < LENGTH.size:
        return None
    end = LENGTH.size + LENGTH.unpack_from(inbox)[0]
    if len(inbox) < end:
        return None
    message = pickle.loads(memoryview(inbox)[LENGTH.size : end].tobytes())  # noqa: S301  # from our child
    del inbox[:end]
    return message


def _is_idle(child: Child) -> bool:
    return child.ready and child.work is None and not child.leaving


def address(target: Target[Any]) -> tuple[str, str]:
    """Where a child finds a target: its handler's module and name. A target that stands nowhere cannot run in a child."""
    if isinstance(target, (OutboxTarget, ForeignTarget)):
        return target.address
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


def check_address(target: Target[Any]) -> None:
    """Raises ConfigError for a target that a child would not find, so that this is known before its first job comes."""
    module, attribute = address(target)
    loaded = sys.modules.get(module)
    if loaded is None or isinstance(target, (OutboxTarget, ForeignTarget)):
        return
    found = None
    with suppress(AttributeError):
        found = _target_of(_at(loaded, attribute))
    if found is not target:
        raise ConfigError(
            f"target {target.name!r}: a child process looks for it as {module}:{attribute}, and something else is there; assign what "
            "the declaration returns to that name, or use thread slots (-P threads)"
        )


def _at(module: Any, attribute: str) -> Any:
    found = module
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def _target_of(found: Any) -> Any:
    """Of a door's call site its target, if it has one by now; else what was found."""
    if isinstance(found, Target):
        return found
    with suppress(QueueError):
        return getattr(found, "target", found)
    return None


# -- in the child ------------------------------------------------------------------------------------------------------


def serve_child(orders: Connection, words: Connection, answers: Connection, options: ChildOptions) -> None:
    """The child's life: import the application, then one job after the other until the parent says or ends."""
    with suppress(OSError):
        os.setpgid(0, 0)  # so that what its jobs start can be killed with it
    for end in (orders, words, answers):
        os.set_inheritable(end.fileno(), False)
    # Daemonic, so that the parent's exit never waits for it; but its jobs may have children of their own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    _be_deaf_to_signals()
    speaking = threading.Lock()

    def say(answer: Answer | Beat | Ready) -> None:
        said = pickle.dumps(astuple(answer) if isinstance(answer, Answer) else answer)
        with speaking:  # a job's threads may send heartbeats
            _write(answers.fileno(), LENGTH.pack(len(said)) + said)

    current = Current(say)
    threading.Thread(target=_listen, args=(words, current), daemon=True).start()
    try:
        if options.setup is not None:
            options.setup()
        for module in options.imports:
            importlib.import_module(module)
    except BaseException as error:
        text = " ".join(str(error).split())[:500]
        say(Ready(f"the application cannot be imported in a child process: {type(error).__name__}: {text}"))
        raise
    say(Ready())
    own, measured, inbox = os.getpid(), options.max_memory is not None, _opened(orders)
    while (order := _next(inbox)) is not None:
        answer = contextvars.Context().run(_run, Order.unpacked(order), current, measured)
        if os.getpid() != own:  # the job forked, and its child came back by the way of its parent
            os._exit(1)
        _flush_streams()
        say(answer)
    _tear_down(options)
    _flush_streams()
    logging.shutdown()
    os._exit(0)


def _tear_down(options: ChildOptions) -> None:
    try:
        if options.teardown is not None:
            options.teardown()
    except BaseException:  # the application's; it ends all the same
        log.exception("a child process did not end well")


def _write(file: int, data: bytes) -> None:
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])


def _opened(pipe: Connection) -> BinaryIO:
    return os.fdopen(os.dup(pipe.fileno()), "rb")


def _next(pipe: BinaryIO) -> Any:
    """The parent's next message."""
    try:
        return pickle.load(pipe)  # noqa: S301  # from the parent
    except BaseException:  # the parent is gone, and with it whoever renews our lease
        with suppress(OSError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _be_deaf_to_signals() -> None:
    """A terminal or a service manager signals all processes; the parent decides what becomes of the jobs. Processes that a job starts
    hear them as usual: a handler ends with exec, where SIG_IGN would stay, and at a fork it is taken back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGTERM] = signal.SIG_DFL  # the server process ignores it
    if before[signal.SIGINT] is signal.SIG_IGN:
        before[signal.SIGINT] = signal.default_int_handler
    for number in before:
        signal.signal(number, lambda *_: None)

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)

    def hear() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        let()

    # Held meanwhile: one that came between the fork and ``hear`` would be lost.
    os.register_at_fork(before=hold, after_in_parent=let, after_in_child=hear)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


@dataclass(eq=False)
class Current:
    """The job that runs, and the last one that was cancelled: either may be known first, as they come by different pipes."""

    say: Callable[[Beat], None]
    running: tuple[bytes, JobContext] | None = None
    cancelled: bytes = b""

    def begin(self, order: Order) -> JobContext:
        context = JobContext(order.job_id, order.target, order.attempt, order.max_attempts)
        self.running = order.claim, context
        if self.cancelled == order.claim:
            context.cancel()
        return context

    def cancel(self, claim: bytes) -> None:
        self.cancelled, running = claim, self.running
        if running is not None and running[0] == claim:
            running[1].cancel()


def _listen(words: Connection, current: Current) -> None:
    stream = _opened(words)
    while True:
        current.cancel(_next(stream))


def _run(order: Order, current: Current, measured: bool) -> Answer:
    context = current.begin(order)
    found: Any = None
    with suppress(ImportError, AttributeError):
        found = _at(importlib.import_module(order.module), order.attribute)
    if order.row is not None and callable(found):
        found = found(order.target)
    elif order.target.startswith(PREFIX) and callable(found):
        found = OutboxTarget(order.target, found, (order.module, order.attribute))
        context.on_beat = partial(current.say, Beat(order.claim))
    found = _target_of(found)
    if not isinstance(found, Target) or found.name != order.target:
        return Answer(int(State.BLOCKED), Kind.UNKNOWN_TARGET, None, 0.0, None, False)
    row = order.row or ClaimedRow(
        order.job_id, ids.ZERO, None, order.target, None, order.payload, None, "", 0, 0, order.attempt, 0, order.max_attempts,
        None, 0, 0,
    )  # fmt: skip
    work = Work(row, found, context, verdict=order.verdict, signal=order.signal, note=order.note)
    outcome = execute(work)
    return Answer(
        int(outcome.state), outcome.kind, outcome.summary, outcome.duration, outcome.delay, context.noticed, outcome.payload,
        outcome.settled, outcome.report, memory_kib() if measured else 0,
    )  # fmt: skip


def memory_kib() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    except (OSError, ValueError):
        return 0
