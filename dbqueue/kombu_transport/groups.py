"""A group's messages are written together: a hundred in one transaction, where each alone would wait for a commit of its own.

Celery publishes the members of a group, and of a chord's header, one after the other, and returns when all are out. Between two of
them nobody needs to find the first one written, so what it publishes for a member is gathered. It is written when it is much; when it
has waited for some time, by another thread if this one is kept by whatever makes the members; before this thread publishes anything
else or looks at a queue; and with the last member, so that an error is that one's own and is tried again as its options say. What could
be refused for what it is goes alone, and raises where it was published.

Nothing of Celery is imported here: its method is wrapped when Celery has come (see the package), and left alone if it is not as we
know it. This module is imported in every program with Celery and dbqueue installed, so it needs nothing but the standard library.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbqueue.database.tables import NewJob
    from dbqueue.kombu_transport.publishing import Publisher

MOST = 100
MOST_BYTES = 1 << 20
LONGEST = 0.05
"""Seconds after which what waits is written."""
SLOW = 0.005
"""Seconds: a source of members that took so long for the last one is not waited for again with messages in hand."""


class Batch:
    """The messages of one group (and of groups inside of it) that wait to be written. It is the thread's that publishes the group."""

    def __init__(self, producer: Any, outer: Batch | None, policy: dict[str, Any]) -> None:
        """``policy``: how to try again what is written between two members, as kombu's ``ensure`` takes it."""
        self.producer = producer
        self.asking = 0
        """A source of members, which is the caller's code, is at work: what it publishes is its own affair."""
        self._outer = outer
        self._policy = policy
        self._owner = _caller()
        self._jobs: list[NewJob] = []
        self._bytes = 0
        self._since = 0.0
        self._channel: Publisher | None = None
        """Through which the last of them came."""
        self._sources = 0
        """From which more members may come."""
        self._expected: set[str] = set()
        """Tasks of members that are not published yet."""
        self._slow = False
        self._failed = False
        """The last writing did, and may have been done all the same."""
        self._refused: Exception | None = None
        """What the watch was told, for the group's own thread."""
        self._ended = False
        self._lock = threading.RLock()
        """Of what waits and its writing."""

    @property
    def active(self) -> bool:
        """False in a thread, a task or a process that has inherited it."""
        return not self._ended and self._owner == _caller()

    # -- publishing --------------------------------------------------------------------------------------------------

    def write(self, channel: Publisher, jobs: list[NewJob]) -> None:
        """One message, for one queue or several. An error of those that wait leaves them waiting, and this one not taken: whoever
        publishes it again writes them first."""
        if self._outer is not None:
            self._outer.flush()
        with self._lock:
            self._take(channel, jobs)

    def _take(self, channel: Publisher, jobs: list[NewJob]) -> None:
        task = jobs[0].task_id
        if task not in self._expected or not all(map(_is_plain, jobs)):
            self.flush()
            channel.station.write(jobs)
            return
        if self._channel is not None and self._channel.station.options != channel.station.options:
            self.flush()  # this member has a connection of its own, to somewhere else
        self._channel = channel
        if not self._sources:
            self._write(jobs)
        else:
            if len(self._jobs) >= MOST or self._bytes >= MOST_BYTES:
                self._write()
            if not self._jobs:
                self._since = time.monotonic()
            self._jobs += jobs
            self._bytes += sum(map(_size, jobs))
        self._expected.discard(task)

    def flush(self) -> None:
        """Writes what waits. Raises what writing raises; what was not written waits on."""
        if self._outer is not None:
            self._outer.flush()
        with self._lock:
            error, self._refused = self._refused, None
            if error is not None:
                raise error
            if self._jobs:
                self._write()

    def flush_if_late(self) -> None:
        """From the watch. What is refused is told in the group's own thread, and what fails is tried again there."""
        if not self._is_late() or not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_late() and self._channel is not None and not self._channel.closed:
                self._write()
        except Exception as error:
            if not self._failed:
                self._refused = error
        finally:
            self._lock.release()

    def _is_late(self) -> bool:
        return bool(self._jobs) and not self._failed and time.monotonic() - self._since >= LONGEST

    def _write(self, more: list[NewJob] | None = None) -> None:
        """``more``: a message that nobody keeps if it fails. Its publisher sends it again, under another id."""
        channel = self._channel
        if channel is None or channel.closed:  # kombu has made its connection anew
            channel = self.producer.channel
        looks, self._failed = self._failed, True
        refusal = channel.station.write_all([*self._jobs, *(more or ())], look_first=looks)
        self._jobs, self._bytes, self._failed = [], 0, False
        if refusal is not None:
            raise refusal

    # -- the group ---------------------------------------------------------------------------------------------------

    def members(self, source: Iterable[Any]) -> Iterator[Any]:
        """The same members. Celery asks for one ahead, so the end is known before the last one is published."""
        members = iter(source)
        self._sources += 1
        try:
            while True:
                if self._refused or (self._jobs and (self._slow or time.monotonic() - self._since >= LONGEST)):
                    self.flush_patiently()
                began = time.monotonic()
                self.asking += 1
                try:
                    member = next(members)
                except StopIteration:
                    return
                finally:
                    self.asking -= 1
                    self._slow = time.monotonic() - began >= SLOW
                if (task := _first_task(member)) is not None:
                    self._expected.add(task)
                yield member
        finally:
            self._sources -= 1

    def flush_patiently(self) -> None:
        """As ``flush``, where no publishing is under way that would be tried again, and whose errors would be translated."""
        self.producer.connection.ensure(self.producer, self.flush, **self._policy)()

    def end(self) -> None:
        try:
            if self._jobs or self._refused:  # the last member was none of a queue
                self.flush_patiently()
        finally:
            self._ended = True

    def give_up(self) -> None:
        """The group has failed; what was published before is published."""
        self._refused = None  # one error is told
        try:
            if self._failed:  # that is why, and it was tried again as often as it should be
                with suppress(Exception):
                    self.flush()
            elif self._jobs:
                self.flush_patiently()
        finally:
            self._ended = True


_current: ContextVar[Batch | None] = ContextVar("dbqueue_batch", default=None)


def current() -> Batch | None:
    """Where a message goes that this thread publishes now; None: it is written at once."""
    batch = _current.get()
    return batch if batch is not None and batch.active else None


def flush() -> None:
    """Writes what waits, before this thread does something else that others see, or looks."""
    batch = current()
    if batch is not None:
        batch.flush()


@contextmanager
def gathering(producer: Any, policy: dict[str, Any]) -> Iterator[Batch]:
    """Until the block ends, what this thread publishes for the members of a group is gathered. A group inside of one, published with
    its producer, is a part of it."""
    outer = current()
    if outer is not None and outer.producer is producer and not outer.asking:
        yield outer
        return
    batch = Batch(producer, outer, policy)
    token = _current.set(batch)
    _watch.add(batch)
    try:
        try:
            yield batch
        except BaseException:
            batch.give_up()
            raise
        batch.end()
    finally:
        _watch.discard(batch)
        _current.reset(token)


class _Watch:
    """One thread for all groups of a process; it sleeps while none is published."""

    def __init__(self) -> None:
        self._batches: set[Batch] = set()
        self._any = threading.Event()
        self._pid = 0

    def add(self, batch: Batch) -> None:
        if self._pid != os.getpid():  # the first, or a child of the process that had it
            self._batches, self._any, self._pid = set(), threading.Event(), os.getpid()
            threading.Thread(target=self._run, name="dbqueue-groups", daemon=True).start()
        self._batches.add(batch)
        self._any.set()

    def discard(self, batch: Batch) -> None:
        self._batches.discard(batch)

    def _run(self) -> None:
        while True:
            self._any.wait()
            time.sleep(LONGEST)
            for batch in tuple(self._batches):
                batch.flush_if_late()
            if not self._batches:
                self._any.clear()
                if self._batches:  # added just now
                    self._any.set()


_watch = _Watch()


def _caller() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _first_task(member: Any) -> str | None:
    """The id of what is published for a member: (signature, result, group), where the result of a chain is its last task's. None: it
    is of no shape that we know."""
    try:
        result = member[1]
        while result.parent is not None:
            result = result.parent
        return str(result.id)
    except (TypeError, LookupError, AttributeError):
        return None


def _size(job: NewJob) -> int:
    return len(job.payload) + len(job.head or b"")


def _is_plain(job: NewJob) -> bool:
    """Nothing of it can be refused by any database, whatever the database's encoding."""
    text = f"{job.target}{job.queue}{job.task_id}"
    return (
        text.isascii() and "\0" not in text and _size(job) <= MOST_BYTES and _fits(job.run_at) and _fits(job.ttl)
    )  # fmt: skip


def _fits(microseconds: int | None) -> bool:
    return microseconds is None or 0 <= microseconds < 1 << 62


# -- Celery's groups ---------------------------------------------------------------------------------------------------


def install() -> None:
    """Has Celery's groups gathered, if Celery is there and its method is as we know it. May be called again."""
    group = getattr(sys.modules.get("celery.canvas"), "group", None)
    method = getattr(group, "_apply_tasks", None)
    if group is not None and method is not None and not hasattr(method, "gathers") and _is_known(method):
        group._apply_tasks = _gathers(method)


def _is_known(method: Any) -> bool:
    """A generator that publishes the members it is given, one after the other, with one producer."""
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return False
    return names[:4] == ["self", "tasks", "producer", "app"] and inspect.isgeneratorfunction(inspect.unwrap(method))


def _gathers(method: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
    @functools.wraps(method)
    def apply_tasks(self: Any, tasks: Any, producer: Any = None, app: Any = None, *args: Any, **options: Any) -> Any:
        app = app or self.app
        with app.producer_or_acquire(producer) as own:
            if _is_ours(own):
                with gathering(own, _policy(app.conf, options)) as batch:
                    return list(method(self, batch.members(tasks), own, app, *args, **options))
        return method(self, tasks, producer, app, *args, **options)

    apply_tasks.gathers = True  # type: ignore[attr-defined]
    return apply_tasks


def _is_ours(producer: Any) -> bool:
    """Whether it publishes to a broker of this transport. Nothing is connected to find that out."""
    connection = getattr(producer, "__connection__", None)
    return connection is not None and getattr(connection.get_transport_cls(), "driver_type", None) == "dbqueue"


def _policy(conf: Any, options: dict[str, Any]) -> dict[str, Any]:
    """How Celery would try again to publish a member."""
    retry = options.get("retry")
    if not (conf.task_publish_retry if retry is None else retry):
        return {"max_retries": 0}
    return {**conf.task_publish_retry_policy, **(options.get("retry_policy") or {})}
