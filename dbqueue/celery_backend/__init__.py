"""Celery's results in the database of the queue: ``result_backend = "dbqueue+postgresql://..."`` or ``"dbqueue+sqlite:///..."`` (C9).

A result is one row, a chord is counted in one. The result of a chord's part is stored and counted in one transaction, and with
the last part the body is published in it too, if the broker is the same database. Sizes of chords and saved groups join the
caller's transaction inside ``dbqueue.using(...)``. ``get()`` sleeps until the database rings; inside such a block it raises, as
the task cannot run before the caller commits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from celery import states
from celery.backends.asynchronous import AsyncBackendMixin, BaseResultConsumer
from celery.backends.base import Backend as CeleryBackend
from celery.canvas import maybe_signature
from celery.exceptions import BackendStoreError, ChordError, ImproperlyConfigured
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.result import AsyncResult, GroupResult, allow_join_result, result_from_tuple
from celery.utils.functional import _regen

from dbqueue import results
from dbqueue.celery_backend import options as configuration
from dbqueue.celery_backend.waiting import Hub, Inbox
from dbqueue.database import joined
from dbqueue.database.dialect import Dialect, OwnSession, Session
from dbqueue.database.engine import Database
from dbqueue.database.tables import ChordCount
from dbqueue.errors import ConnectionLost, DatabaseBusy, DifferentDatabase, EnqueueFailed, NotSupported, QueueError
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
        self.pruned_at = time.monotonic()


_places: dict[configuration.Options, Place] = {}
_places_of = os.getpid()
_places_lock = threading.Lock()


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
    _places_lock = threading.Lock()


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

    def on_wait_for_pending(self, result: Any, **kwargs: Any) -> None:
        self.inbox.every_state = self.inbox.every_state or kwargs.get("on_message") is not None
        for meta in result._iter_meta():
            if meta is not None:
                self.on_state_change(meta, None)

    def _wait_for_pending(
        self, result: Any, timeout: Any = None, on_interval: Any = None, on_message: Any = None, **kwargs: Any
    ) -> Any:
        refuse_in_transaction()
        self.inbox.every_state = on_message is not None
        return super()._wait_for_pending(
            result, timeout=timeout, on_interval=on_interval, on_message=on_message, **kwargs
        )

    def consume_from(self, task_id: str) -> None:
        self.backend.place.hub.add(task_id, self.inbox)

    def cancel_for(self, task_id: str) -> None:
        self.backend.place.hub.remove(task_id, self.inbox)

    def drain_events(self, timeout: float | None = None) -> None:
        inbox = self.inbox
        self.backend.place.hub.wait(inbox, 1.0 if timeout is None else timeout)
        if not inbox.news:
            raise TimeoutError
        while inbox.news:
            self.on_state_change(self.backend.decoded(inbox.news.popleft().meta), None)


def refuse_in_transaction() -> None:
    block = joined.current()
    if block is not None and not block.closed:
        raise NotSupported(
            "waiting for a result inside using(...): the task cannot run before your transaction commits; wait after the block"
        )


class _Current(threading.local):
    """The transaction that a thread is in, and the result that it is about to store there."""

    session: OwnSession | None = None
    held: str | None = None
    stored: tuple[str, str, bytes, int | None] | None = None


class Backend(AsyncBackendMixin, CeleryBackend):
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
        self._current = _Current()
        self.result_consumer = _Consumer(self, app, self.accept, self._pending_results, self._pending_messages)

    @property
    def place(self) -> Place:
        return _place(self.options)

    def as_uri(self, include_password: bool = False) -> str:
        return f"dbqueue+{self.url}" if include_password else f"dbqueue+{self.place.database.label}"

    def __reduce__(self, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})

    # -- whose transaction -------------------------------------------------------------------------------------------

    def _write(self, verb: Callable[[Dialect, Session], T], *, joins: bool = False) -> T:
        database, block = self.place.database, joined.current()
        dialect = database.dialect
        if self._current.session is not None:
            return verb(dialect, self._current.session)
        if not joins or block is None:
            database.ready()
            if block is not None:
                block.notice(database)
            return database.run(lambda session: verb(dialect, session))
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
        database = self.place.database
        database.ready()
        with database.transaction() as session:
            self._current.session = session
            try:
                yield session
            finally:
                self._current.session = None

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        if isinstance(exc, EnqueueFailed) and exc.__cause__ is not None:
            exc = exc.__cause__
        return isinstance(exc, (ConnectionLost, DatabaseBusy))

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
        row = task_id, state, self.encoded(meta, f"the result of task {task_id}"), ttl
        if self._current.held == task_id:
            self._current.stored = row
        else:
            self._write(lambda dialect, session: results.store(dialect, session, *row))
            self._prune_sometimes()
        return result

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
            found = self._ensure_retryable(
                self._read, lambda dialect, session: results.load(dialect, session, sorted(waiting))
            )
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
        refuse_in_transaction()
        return super().wait_for_pending(result, *args, **kwargs)

    def iter_native(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_in_transaction()
        return super().iter_native(result, *args, **kwargs)

    def cleanup(self) -> None:
        """Deletes everything that has expired, in short transactions."""
        while self._write(lambda dialect, session: results.prune(dialect, session, 1_000)):
            pass

    def _prune_sometimes(self) -> None:
        place, now = self.place, time.monotonic()
        if now - place.pruned_at < PRUNE_EVERY:
            return
        place.pruned_at = now
        try:
            self._write(lambda dialect, session: results.prune(dialect, session, PRUNE_AT_ONCE))
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

    # -- chords ------------------------------------------------------------------------------------------------------

    def set_chord_size(self, group_id: Any, chord_size: int) -> None:
        ttl = self._ttl(self._chord_expires)
        self._ensure_retryable(
            self._write,
            lambda dialect, session: results.set_chord_size(dialect, session, str(group_id), chord_size, ttl),
            joins=True,
        )

    def add_to_chord(self, chord_id: Any, result: Any) -> None:
        ttl = self._ttl(self._chord_expires)
        self._ensure_retryable(
            self._write, lambda dialect, session: results.add_to_chord(dialect, session, str(chord_id), ttl), joins=True
        )

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """A header of plain tasks needs nothing but its parts; one with groups in it is saved, so that the body gets their shape."""
        if not isinstance(header_result_args[1], _regen):
            header = self.app.GroupResult(*header_result_args)
            if any(isinstance(part, GroupResult) for part in header.results):
                self.save_group(header.id, header)

    def mark_as_done(self, task_id: Any, result: Any, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self._holding(task_id, request):
            return super().mark_as_done(task_id, result, request, *args, **kwargs)

    def mark_as_failure(
        self, task_id: Any, exc: Any, traceback: Any = None, request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        with self._holding(task_id, request):
            return super().mark_as_failure(task_id, exc, traceback, request, *args, **kwargs)

    def mark_as_revoked(self, task_id: Any, reason: Any = "", request: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self._holding(task_id, request):
            return super().mark_as_revoked(task_id, reason, request, *args, **kwargs)

    @contextmanager
    def _holding(self, task_id: Any, request: Any) -> Iterator[None]:
        """The result of a chord's part is not stored at once, but when it is counted, in the same transaction."""
        current = self._current
        if current.held is not None or not (request and request.chord and request.group):
            yield
            return
        current.held, current.stored = str(task_id), None
        try:
            yield
        finally:
            stored, current.held, current.stored = current.stored, None, None
        if stored is not None:  # nobody counted it
            self._ensure_retryable(self._write, lambda dialect, session: results.store(dialect, session, *stored))

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        if not request.group or not request.id:
            return
        current = self._current
        stored, current.held, current.stored = current.stored, None, None
        part = results.LAST_PART if request.group_index is None else int(request.group_index)
        raw = self.encoded([1, request.id, state, self.encode_result(result, state)], f"the result of {request.id}")
        callback = maybe_signature(request.chord, app=self.app)
        error = self._ensure_retryable(self._count, str(request.group), str(request.id), part, raw, stored, callback)
        if error is not None:
            # Outside of the transaction: error callbacks are the user's code. If we die before the end, a redelivered part does it.
            log.error("chord %s failed: %s", request.group, type(error.__cause__ or error).__name__)
            self.chord_error_from_stack(callback, error)
            self._ensure_retryable(
                self._write, lambda dialect, session: results.end_chord(dialect, session, str(request.group))
            )

    def _count(
        self,
        group_id: str,
        task_id: str,
        part: int,
        raw: bytes,
        stored: tuple[str, str, bytes, int | None] | None,
        callback: Any,
    ) -> ChordError | None:
        """Stores, counts, and publishes the body if this was the last part, in one transaction. Returns why there is no body."""
        dialect = self.place.database.dialect
        with self._transaction() as session:
            if stored is not None:
                results.store(dialect, session, *stored)
            ttl = self._ttl(self._chord_expires)
            count: ChordCount = results.count_part(dialect, session, group_id, task_id, part, raw, ttl)
            if not count.complete:
                return None
            try:
                values = self._header_values(session, group_id)
            except ChordError as error:
                return error
            except QueueError:
                raise
            except Exception as error:
                return _caused(f"Join error: {error!r}", error)
            try:
                self._publish(session, callback, values)
            except QueueError:
                raise
            except Exception as error:
                return _caused(f"Callback error: {error!r}", error)
            results.end_chord(dialect, session, group_id)
            results.delete_group(dialect, session, group_id)
            return None

    def _publish(self, session: OwnSession, body: Any, values: list[Any]) -> None:
        """In our transaction if the broker is the same database, else beside it, and before it commits: rather twice than never."""
        publish = getattr(self.app.amqp, "_retry_publish", lambda call, *args: call(*args))
        try:
            with joined.using(session.connection):
                publish(body.delay, values)
        except DifferentDatabase:
            publish(body.delay, values)

    def _header_values(self, session: OwnSession, group_id: str) -> list[Any]:
        header = GroupResult.restore(group_id, backend=self, app=self.app)
        if header is None:
            dialect = self.place.database.dialect
            return [self._value(raw) for raw in results.chord_parts(dialect, session, group_id)]
        leaves = list(_leaves(header))
        found = self._read(lambda dialect, session: results.load(dialect, session, [leaf.id for leaf in leaves]))
        for leaf in leaves:
            if leaf.id in found:
                leaf._maybe_set_cache(self.decoded(found[leaf.id][1]))
        missing = [leaf.id for leaf in leaves if leaf._cache is None]
        if missing:
            raise ChordError(f"Dependency {missing[0]} has no result any more")
        for leaf in leaves:
            if leaf.state in states.PROPAGATE_STATES:
                raise _failed(leaf.id, leaf.result)
        header.on_ready()
        with allow_join_result():
            values: list[Any] = header.join(timeout=self.app.conf.result_chord_join_timeout, propagate=True)
        return values

    def _value(self, raw: bytes) -> Any:
        _, task_id, state, value = self.decode(raw)
        if state in states.EXCEPTION_STATES:
            value = self.exception_to_python(value)
        if state in states.PROPAGATE_STATES:
            raise _failed(task_id, value)
        return value


def _leaves(result: Any) -> Iterator[AsyncResult]:
    for part in result.results:
        if isinstance(part, GroupResult):
            yield from _leaves(part)
        else:
            yield part


def _failed(task_id: str, error: object) -> ChordError:
    """In the words that Celery's users know: it becomes the body's result, and so it is theirs as the error is."""
    return _caused(f"Dependency {task_id} raised {error!r}", error)


def _caused(text: str, cause: object) -> ChordError:
    error = ChordError(text)
    error.__cause__ = cause if isinstance(cause, Exception) else None
    return error


def _said(conf: Any, name: str) -> bool:
    """Whether the user chose a value."""
    return bool(conf.value_set_for(name)) if hasattr(conf, "value_set_for") else name in getattr(conf, "changes", {})
