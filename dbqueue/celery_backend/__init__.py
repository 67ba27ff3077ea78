"""Celery's results in the database of the queue: ``result_backend = "dbqueue+postgresql://..."`` or ``"dbqueue+sqlite:///..."`` (C9).

A result is one row, a chord is counted in one. The result of a chord's part is stored and counted in one transaction, and with
the last part the body is published in it too, if the broker is the same database. Sizes of chords and saved groups join the
caller's transaction inside ``dbqueue.using(...)``. ``get()`` sleeps until the database rings; inside such a block it raises, as
the task cannot run before the caller commits.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from celery import states
from celery.backends.asynchronous import AsyncBackendMixin, BaseResultConsumer
from celery.backends.base import Backend as CeleryBackend
from celery.exceptions import BackendStoreError, ChordError, ImproperlyConfigured
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.result import AsyncResult, result_from_tuple
from celery.utils.time import get_exponential_backoff_interval

from dbqueue import results
from dbqueue.celery_backend import options as configuration
from dbqueue.celery_backend.chords import Chords, Current
from dbqueue.celery_backend.recording import Row
from dbqueue.celery_backend.waiting import Hub, Inbox
from dbqueue.database import joined
from dbqueue.database.dialect import Dialect, OwnSession, Session
from dbqueue.database.engine import Database
from dbqueue.errors import ConnectionLost, DatabaseBusy, NotSupported, QueueError
from dbqueue.queue import open_database
from dbqueue.runtime.idle import IdleSessions

T = TypeVar("T")

log = logging.getLogger("dbqueue.results")

RETRIES = 20
"""How often storing and reading are tried again unless the app says otherwise: for about a minute, as long as a failover takes."""
PRUNE_EVERY, PRUNE_AT_ONCE = 60.0, 200
"""Seconds, and rows of a kind: whoever stores results now and then deletes a few that have expired, so that there need be no beat."""


class Place:
    """One database as the results of one process see it, shared by all backend objects (an app has one in each thread)."""

    def __init__(self, options: configuration.Options) -> None:
        self.database: Database = open_database(options.settings)
        self.hub = Hub(self.database)
        self._idle = IdleSessions(self.database)
        self.pid = os.getpid()
        self.pruned_at = time.monotonic()


_places: dict[configuration.Options, Place] = {}
_places_of = os.getpid()
_places_lock = threading.RLock()  # the garbage collector may come in between


def _place(options: configuration.Options) -> Place:
    global _places_of
    with _places_lock:
        if _places_of != os.getpid():  # the parent's connections are neither used nor closed here
            _forgotten.append(dict(_places))
            _places.clear()
            _places_of = os.getpid()
        if options not in _places:
            _places[options] = Place(options)
        return _places[options]


_forgotten: list[dict[configuration.Options, Place]] = []


def _fresh_lock() -> None:
    global _places_lock
    _places_lock = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)


class _Consumer(BaseResultConsumer):
    """What Celery waits with. Its ``drainer`` calls ``drain_events``: in the waiting thread, or in a greenlet for all of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inbox, self._pid = Inbox(), os.getpid()

    @property
    def inbox(self) -> Inbox:
        if self._pid != os.getpid():
            self._inbox, self._pid = Inbox(), os.getpid()
        return self._inbox

    def start(self, initial_task_id: str, **kwargs: Any) -> None:
        self.consume_from(initial_task_id)

    def _wait_for_pending(
        self, result: Any, timeout: Any = None, on_interval: Any = None, on_message: Any = None, **kwargs: Any
    ) -> Any:
        refuse_in_transaction()
        return self._sleeping(
            result,
            super()._wait_for_pending(result, timeout, on_interval, on_message, **kwargs),
            on_message is not None,
        )

    def _sleeping(self, result: Any, steps: Iterator[Any], curious: bool) -> Iterator[Any]:
        inbox, parts = self.inbox, list(_unready(result))
        waited = [str(part.id) for part in parts]
        # A group that another thread made waits here, with this thread's backend, and its members know the other one only.
        strangers = [part for part in parts if part.backend is not self.backend]
        for part in strangers:
            self.backend.add_pending_result(part, start_drainer=False)
        self.backend.place.hub.begin(waited, inbox, curious)
        try:
            yield from steps
        finally:
            self.backend.place.hub.end(waited, inbox, curious)
            for part in strangers:
                self.backend.remove_pending_result(part)
                bucket = self.buckets.pop(part, None)
                if bucket is not None and part._cache is not None:  # it became ready by the other backend
                    bucket.append(part)

    def on_wait_for_pending(self, result: Any, **kwargs: Any) -> None:
        for meta in result._iter_meta():
            if meta is not None:
                self.on_state_change(meta, None)
        self.backend.place.hub.was_read(str(part.id) for part in getattr(result, "results", [result]))

    def drain_events_until(self, p: Any, timeout: float | None = None, on_interval: Any = None) -> Any:
        """A second at a time, for ``on_interval``; and not longer than ``timeout``."""
        until = None if timeout is None else time.monotonic() + timeout

        def wait(timeout: float | None = None) -> None:
            left = 1.0 if until is None else until - time.monotonic()
            self.drain_events(min(1.0, left))

        interval = 1 if timeout is None else max(0.001, min(1.0, timeout))
        return self.drainer.drain_events_until(
            p, timeout=timeout, interval=interval, on_interval=on_interval, wait=wait
        )

    def consume_from(self, task_id: str) -> None:
        self.backend.place.hub.add(str(task_id), self.inbox)

    def cancel_for(self, task_id: str) -> None:
        """The garbage collector calls it too, at any moment: it neither locks nor makes anything."""
        place = self.backend.known_place
        if place is not None:
            place.hub.remove(str(task_id), self.inbox)

    def drain_events(self, timeout: float | None = None) -> None:
        inbox, hub = self.inbox, self.backend.place.hub
        if not hub.wait(inbox, 1.0 if timeout is None else timeout):
            raise TimeoutError
        while (news := inbox.take()) is not None:
            try:
                self.on_state_change(self.backend.decoded(news.meta), None)
            finally:
                hub.handled(inbox)


def _unready(result: Any) -> Iterator[AsyncResult]:
    """The results of single tasks that a result, a set or a group of results still lacks."""
    parts = getattr(result, "results", None)
    if parts is None:
        if result._cache is None:
            yield result
        return
    for part in parts:
        yield from _unready(part)


def refuse_in_transaction() -> None:
    block = joined.current()
    if block is not None and not block.closed:
        raise NotSupported(
            "waiting for a result inside using(...): the task cannot run before your transaction commits; wait after the block"
        )


class Backend(Chords, AsyncBackendMixin, CeleryBackend):
    """One app's results. Thread-safe, and safe across a fork: a child opens connections of its own."""

    supports_native_join = True
    supports_result_compression = True
    supports_failure_expires = True
    persistent = True
    always_retry: Any
    max_retries: Any

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        super().__init__(app=app, url=url, **kwargs)
        if not url:
            raise ImproperlyConfigured(
                "result_backend must name the database: dbqueue+postgresql://... or dbqueue+sqlite:///..."
            )
        conf = app.conf
        self.options = configuration.read(url, conf.get("result_backend_transport_options") or {})
        if not _said(conf, "result_backend_always_retry") or self.always_retry is None:
            self.always_retry = True
        if not _said(conf, "result_backend_max_retries") or self.max_retries is None:
            self.max_retries = RETRIES
        failure = conf.get("result_failure_expires")
        self._failure_expires = self.expires if failure is None else self.prepare_expires(failure)
        chord = conf.get("result_chord_expires")
        self._chord_expires = self.expires if chord is None else self.prepare_expires(chord)
        self._current = Current()
        self._place: Place | None = None
        self.result_consumer = _Consumer(self, app, self.accept, self._pending_results, self._pending_messages)

    @property
    def known_place(self) -> Place | None:
        """Of this process, if it was used here before."""
        place = self._place
        return place if place is not None and place.pid == os.getpid() else None

    @property
    def place(self) -> Place:
        place = self.known_place
        if place is None:
            place = self._place = _place(self.options)
        return place

    def as_uri(self, include_password: bool = False) -> str:
        return f"dbqueue+{self.url}" if include_password else f"dbqueue+{self.place.database.label}"

    def __reduce__(self, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})

    # -- whose transaction -------------------------------------------------------------------------------------------

    def _write(self, verb: Callable[[Dialect, Session], T], *, joins: bool = False, several: bool = False) -> T:
        """``joins``: the caller's transaction; ``several``: statements, which need one of our own."""
        database, block = self.place.database, joined.current()
        dialect = database.dialect
        if self._current.session is not None:
            return verb(dialect, self._current.session)
        if not joins or block is None:
            database.ready()
            if block is not None:
                block.notice(database)
            # SQLite waits for its write lock only at the beginning of a transaction.
            scope = database.run if several or dialect.name == "sqlite" else database.single
            return scope(lambda session: verb(dialect, session))
        block.check(database)
        if block.buffer is not None:
            block.buffer.defer(database, lambda session: verb(dialect, session))
            return None  # type: ignore[return-value]  # of writes, nobody asks
        with joined.failures(database):
            return verb(dialect, block.session(database))

    def _read(self, verb: Callable[[Dialect, Session], T]) -> T:
        database = self.place.database
        if self._current.session is not None:
            return verb(database.dialect, self._current.session)
        database.ready()
        return database.read(lambda session: verb(database.dialect, session))

    @contextmanager
    def _transaction(self) -> Iterator[OwnSession]:
        """Everything that this thread stores until the block ends commits together."""
        database, block = self.place.database, joined.current()
        database.ready()
        if block is not None:
            block.notice(database)
        with database.transaction() as session, self._inside(session):
            yield session

    @contextmanager
    def _inside(self, session: OwnSession) -> Iterator[None]:
        """Everything that this thread reads and writes until the block ends is done on ``session``."""
        before, self._current.session = self._current.session, session
        try:
            yield
        finally:
            self._current.session = before

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """Not what failed inside of a transaction: that as a whole is tried again."""
        return self._current.session is None and isinstance(exc, (ConnectionLost, DatabaseBusy))

    def _persist(self, call: Callable[[], T]) -> T:
        """Tries again as Celery does around the operations that it knows, as the app's settings for backends say."""
        for tries in itertools.count(1):
            try:
                return call()
            except Exception as error:
                if not self.always_retry or tries > self.max_retries or not self.exception_safe_to_retry(error):
                    raise
                log.warning("a result could not be written or read (try %s): %s", tries, error)
            pause = get_exponential_backoff_interval(
                self.base_sleep_between_retries_ms, tries, self.max_sleep_between_retries_ms, full_jitter=True
            )
            self._sleep(pause / 1_000)
        raise AssertionError("unreachable")

    def _ttl(self, seconds: float | None) -> int | None:
        """In microseconds; None: for ever, which Celery writes as 0 or None."""
        return round(seconds * 1_000_000) if seconds else None

    # -- results -----------------------------------------------------------------------------------------------------

    def encoded(self, meta: Any, what: str) -> bytes:
        data = self.encode(meta)
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if len(raw) > self.options.max_bytes:
            raise BackendStoreError(
                f"{what} has {len(raw)} bytes, the limit is {self.options.max_bytes} (max_result_bytes in "
                "result_backend_transport_options): store it elsewhere and return where it lies"
            )
        return raw

    def decoded(self, meta: bytes) -> dict[str, Any]:
        decoded: dict[str, Any] = self.decode_result(meta)
        return decoded

    def _store_result(
        self, task_id: Any, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = task_id = str(task_id)
        ttl = self._ttl(self._failure_expires if state == states.FAILURE else self.expires)
        row = Row(task_id, state, self.encoded(meta, f"the result of task {task_id}"), ttl)
        if not self._take(row, request, result):
            self._store_row(row)
            self._prune_sometimes()
        return result

    def _store_row(self, row: Row) -> None:
        self._write(lambda dialect, session: results.store(dialect, session, *row))

    def _load(self, task_ids: Iterable[str]) -> dict[str, tuple[str, bytes]]:
        return self._read(lambda dialect, session: results.load(dialect, session, task_ids))

    def _get_task_meta_for(self, task_id: Any) -> dict[str, Any]:
        found = self._read(lambda dialect, session: results.load(dialect, session, [str(task_id)]))
        if not found:
            return {"status": states.PENDING, "result": None}
        return self.decoded(found[str(task_id)][1])

    def task_result_exists(self, task_id: Any) -> bool:
        return bool(self._read(lambda dialect, session: results.load(dialect, session, [str(task_id)])))

    def _forget(self, task_id: Any) -> None:
        self._write(lambda dialect, session: results.forget(dialect, session, str(task_id)))
        self.result_consumer.cancel_for(str(task_id))

    def get_many(
        self, task_ids: Iterable[Any], timeout: float | None = None, interval: float | None = 0.5, no_ack: bool = True,
        on_message: Any = None, on_interval: Any = None, max_iterations: int | None = None, **kwargs: Any,
    ) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
        """Yields (id, meta) of the ready ones as they become ready; stops after ``max_iterations`` reads."""
        refuse_in_transaction()
        waiting, reads = {str(task_id) for task_id in task_ids}, 0
        until = None if timeout is None else time.monotonic() + timeout
        while waiting:
            found = self._persist(partial(self._load, sorted(waiting)))
            for task_id, (state, raw) in found.items():
                if state in states.READY_STATES:
                    waiting.discard(task_id)
                    meta = self._cache[task_id] = self.decoded(raw)
                    if on_message is not None:
                        on_message(meta)
                    yield task_id, meta
            reads += 1
            if not waiting or reads == max_iterations:
                return
            if until is not None and time.monotonic() >= until:
                raise CeleryTimeout(f"Operation timed out ({timeout})")
            if on_interval:
                on_interval()
            pause = 0.5 if interval is None else interval
            time.sleep(pause if until is None else max(0.0, min(pause, until - time.monotonic())))

    def wait_for_pending(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a chord that fails while this waits, the header's own error is raised, as it is for whoever asks later."""
        refuse_in_transaction()
        try:
            return super().wait_for_pending(result, *args, **kwargs)
        except ChordError:
            if kwargs.get("on_interval") is not None:
                kwargs["on_interval"]()
            raise

    def iter_native(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_in_transaction()
        return super().iter_native(result, *args, **kwargs) if result.results else iter(())

    def cleanup(self) -> None:
        """Deletes everything that has expired, in short transactions."""
        while self._write(lambda dialect, session: results.prune(dialect, session, 1_000), several=True):
            pass

    def _prune_sometimes(self) -> None:
        place, now = self.place, time.monotonic()
        if now - place.pruned_at < PRUNE_EVERY:
            return
        place.pruned_at = now
        try:
            self._write(lambda dialect, session: results.prune(dialect, session, PRUNE_AT_ONCE), several=True)
        except QueueError as error:
            log.debug("expired results: %s", error)

    # -- groups ------------------------------------------------------------------------------------------------------

    def _save_group(self, group_id: Any, result: Any) -> Any:
        raw, ttl = self.encoded({"result": result.as_tuple()}, f"group {group_id}"), self._ttl(self.expires)
        self._write(lambda dialect, session: results.save_group(dialect, session, str(group_id), raw, ttl), joins=True)
        return result

    def _restore_group(self, group_id: Any) -> Any:
        raw = self._read(lambda dialect, session: results.load_group(dialect, session, str(group_id)))
        if raw is None:
            return None
        meta = self.decode(raw)
        return {**meta, "result": result_from_tuple(meta["result"], self.app)}

    def _delete_group(self, group_id: Any) -> None:
        self._write(lambda dialect, session: results.delete_group(dialect, session, str(group_id)))


def _said(conf: Any, name: str) -> bool:
    """Whether the user chose a value."""
    return bool(conf.value_set_for(name)) if hasattr(conf, "value_set_for") else name in getattr(conf, "changes", {})
