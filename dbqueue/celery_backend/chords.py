"""Chords of Celery in the database of the queue, and what of a task's end is stored together or recorded for later.

The result of a chord's part is stored and counted in one transaction, and with the last part the body is published in it too, if
the broker is the same database; otherwise it is published before that transaction commits, and perhaps twice. A part that returns
again, or whose COMMIT had no answer, finds itself counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import states
from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.result import AsyncResult, GroupResult
from celery.utils.functional import _regen

from dbqueue import results
from dbqueue.celery_backend.recording import Part, Record, Row
from dbqueue.database import joined
from dbqueue.database.dialect import OwnSession
from dbqueue.database.tables import NewJob
from dbqueue.errors import ConnectionLost, DatabaseBusy, DifferentDatabase, EnqueueFailed, QueueError

if TYPE_CHECKING:
    from celery.backends.base import Backend as _Celerys
else:
    _Celerys = object

log = logging.getLogger("dbqueue.results")


class Current(threading.local):
    """What a thread is in the midst of."""

    session: OwnSession | None = None
    """The transaction that it is in."""
    marking = False
    """A task ends: this is not ``update_state``."""
    held: Row | None = None
    """The result of a chord's part, which is stored when it is counted."""
    of: tuple[Any, Any] = None, None
    """The request and the value of what is held."""
    record: Record | None = None
    """Where its tasks' ends go."""


class Chords(_Celerys):
    """The half of the backend that ends tasks and counts chords."""

    # What the other half has.
    place: Any
    _current: Current
    _chord_expires: float | None
    _ttl: Callable[..., int | None]
    _write: Callable[..., Any]
    _read: Callable[..., Any]
    _persist: Callable[..., Any]
    _transaction: Callable[..., Any]
    _inside: Callable[..., Any]
    _store_row: Callable[[Row], None]
    encoded: Callable[[Any, str], bytes]
    decoded: Callable[[bytes], dict[str, Any]]

    # -- starting ----------------------------------------------------------------------------------------------------

    def set_chord_size(self, group_id: Any, chord_size: int) -> None:
        group_id, ttl = str(group_id), self._ttl(self._chord_expires)
        self._persist(
            lambda: self._write(
                lambda dialect, session: results.set_chord_size(dialect, session, group_id, chord_size, ttl), joins=True
            )
        )

    def add_to_chord(self, chord_id: Any, result: Any) -> None:
        group_id, added, ttl = str(chord_id), str(result.id), self._ttl(self._chord_expires)
        self._persist(
            lambda: self._write(
                lambda dialect, session: results.add_to_chord(dialect, session, group_id, added, ttl),
                joins=True,
                several=True,
            )
        )

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """A header of plain tasks needs nothing but its parts; one with groups in it is saved, so that the body gets their shape."""
        if isinstance(header_result_args[1], _regen):
            return
        header = self.app.GroupResult(*header_result_args)
        if any(isinstance(part, GroupResult) for part in header.results):
            raw = self.encoded({"result": header.as_tuple()}, f"group {header.id}")
            group_id, ttl = str(header.id), self._ttl(self._chord_expires)
            self._persist(
                lambda: self._write(
                    lambda dialect, session: results.save_group(dialect, session, group_id, raw, ttl), joins=True
                )
            )

    # -- tasks that end ----------------------------------------------------------------------------------------------

    def mark_as_done(self, task_id: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        with self._marking():
            return super().mark_as_done(task_id, result, *args, **kwargs)

    def mark_as_failure(self, task_id: Any, exc: Any, *args: Any, **kwargs: Any) -> Any:
        with self._marking():
            return super().mark_as_failure(task_id, exc, *args, **kwargs)

    def mark_as_revoked(self, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        with self._marking():
            return super().mark_as_revoked(task_id, *args, **kwargs)

    def mark_as_retry(self, task_id: Any, exc: Any, *args: Any, **kwargs: Any) -> Any:
        with self._marking():
            return super().mark_as_retry(task_id, exc, *args, **kwargs)

    @contextmanager
    def _marking(self) -> Iterator[None]:
        current = self._current
        if current.marking:
            yield
            return
        current.marking = True
        try:
            yield
            self._let_go()
        finally:
            current.marking, current.held, current.of = False, None, (None, None)

    def _take(self, row: Row, request: Any, result: Any) -> bool:
        """Whether the result of a task that ends is not to be stored at once: it is a chord's part (of a chain, perhaps, whose earlier
        task failed), and will be counted next; or it is recorded."""
        current = self._current
        if not current.marking:
            return False
        if row.state in states.READY_STATES and getattr(request, "chord", None) and getattr(request, "group", None):
            self._let_go()
            current.held, current.of = row, (request, result)
            return True
        if current.record is not None:
            current.record.entries.append(row)
            return True
        return False

    def _let_go(self) -> None:
        """What is held was not counted. Celery leaves that out for what it finds failed; but then who counted it may have died before he
        told the errors of the chord, so it is counted again, which counts once."""
        row, (request, result) = self._current.held, self._current.of
        if row is None:
            return
        if row.state in states.PROPAGATE_STATES and str(request.id) == row.task_id:
            self.on_chord_part_return(request, row.state, result)
            return
        self._current.held = None
        if self._current.record is not None:
            self._current.record.entries.append(row)
        else:
            self._persist(lambda: self._store_row(row))

    # -- counting ----------------------------------------------------------------------------------------------------

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        if not request.group or not request.id:
            return
        current, task_id = self._current, str(request.id)
        if current.held is not None and current.held.task_id != task_id:
            self._let_go()
        row, current.held = current.held, None
        place = results.LAST_PART if request.group_index is None else int(request.group_index)
        meta = self.encoded([1, task_id, state, self.encode_result(result, state)], f"the result of {task_id}")
        part = Part(str(request.group), task_id, place, meta, row, request.chord)
        if current.record is not None:
            current.record.entries.append(part)
            return
        error = self._persist(lambda: self._count_in_own(part))
        if error is not None:
            # Outside of the transaction: error callbacks are the user's code. If we die before the end, a redelivered part does it.
            self._fail_chord(part, error)

    def _count_in_own(self, part: Part) -> ChordError | None:
        with self._transaction() as session:
            return self._count(session, part)

    def _count(self, session: OwnSession, part: Part) -> ChordError | None:
        """Stores, counts, and publishes the body if this was the last part. Returns why there is no body; the chord is not ended then,
        and nothing of the body is published."""
        dialect = self.place.database.dialect
        if part.row is not None:
            results.store(dialect, session, *part.row)
        ttl = self._ttl(self._chord_expires)
        count = results.count_part(dialect, session, part.group_id, part.task_id, part.place, part.meta, ttl)
        if not count.complete:
            return None
        session.execute("SAVEPOINT dbqueue_body")
        try:
            self._publish_body(session, part)
        except Exception as error:
            self._raise_passing(error)
            session.execute("ROLLBACK TO SAVEPOINT dbqueue_body")
            return error if isinstance(error, ChordError) else _caused(f"Callback error: {error!r}", error)
        session.execute("RELEASE SAVEPOINT dbqueue_body")
        results.end_chord(dialect, session, part.group_id)
        results.delete_group(dialect, session, part.group_id)
        return None

    def _publish_body(self, session: OwnSession, part: Part) -> None:
        """In our transaction if the broker is the same database, else beside it, and before it commits: rather twice than never."""
        try:
            values = self._header_values(session, part.group_id)
        except ChordError:
            raise
        except Exception as error:
            self._raise_passing(error)
            raise ChordError(f"Join error: {error!r}") from error
        body = maybe_signature(part.body, app=self.app)
        publish = getattr(self.app.amqp, "_retry_publish", lambda call, *args: call(*args))
        try:
            with joined.using(session.connection):
                publish(body.delay, values)
        except DifferentDatabase:
            publish(body.delay, values)

    def _raise_passing(self, error: Exception) -> None:
        """Raises ConnectionLost or DatabaseBusy if that is what happened on the connection of the transaction that we are in."""
        cause = error.__cause__ if isinstance(error, EnqueueFailed) and error.__cause__ is not None else error
        kind = type(cause) if isinstance(cause, QueueError) else self.place.database.dialect.classify(cause)
        if kind is not None and issubclass(kind, (ConnectionLost, DatabaseBusy)):
            raise kind(f"the body of a chord was not published ({type(cause).__name__})") from cause

    def _fail_chord(self, part: Part, error: ChordError) -> None:
        log.error("chord %s failed: %s", part.group_id, type(error.__cause__ or error).__name__)
        try:
            raise error  # Celery takes it, and its traceback, from there
        except ChordError:
            self.chord_error_from_stack(maybe_signature(part.body, app=self.app), error)
        self._persist(
            lambda: self._write(
                lambda dialect, session: results.end_chord(dialect, session, part.group_id), several=True
            )
        )

    def _header_values(self, session: OwnSession, group_id: str) -> list[Any]:
        """What the parts returned: in the order of the header, or in its shape, where groups in it made one. Raises ChordError."""
        dialect = self.place.database.dialect
        parts = [self.decode(raw) for raw in results.chord_parts(dialect, session, group_id)]
        values = {str(task_id): self._value(task_id, state, value) for _, task_id, state, value in parts}
        header = self._restore_group(group_id)
        if header is None:
            return list(values.values())
        leaves = [leaf.id for leaf in _leaves(header["result"])]
        # Those that counted elsewhere: of a group that is counted in a chord of its own, say.
        for task_id, (_, raw) in results.load(
            dialect, session, [leaf for leaf in leaves if leaf not in values]
        ).items():
            meta = self.decode(raw)
            values[task_id] = self._value(task_id, meta["status"], meta["result"])
        missing = [leaf for leaf in leaves if leaf not in values]
        if missing:
            raise ChordError(f"Dependency {missing[0]} has no result any more")
        return _shaped(header["result"], values)

    def _value(self, task_id: Any, state: str, value: Any) -> Any:
        if state in states.EXCEPTION_STATES:
            value = self.exception_to_python(value)
        if state in states.PROPAGATE_STATES:
            raise _caused(f"Dependency {task_id} raised {value!r}", value)
        return value

    # -- recording ---------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Until the block ends, the ends of this thread's tasks (done, failure, retry, revoked) and returned parts of chords are recorded
        instead of stored. Other states and ``get()`` are not. What the tracer publishes is recorded inside of ``publishing``."""
        before, self._current.record = self._current.record, Record()
        try:
            yield self._current.record
        finally:
            self._current.record = before

    @contextmanager
    def publishing(self, record: Record) -> Iterator[None]:
        """Until the block ends, what this thread publishes is recorded, if the broker is this database."""
        self.place.database.ready()
        with record.publishing(self.place.database.database_id):
            yield

    def apply(self, session: OwnSession, record: Record) -> None:
        """Writes what was recorded in the transaction that ``session`` is in, which belongs to the caller, who commits it.

        The body of a chord is published in it too. So are the error callbacks of a chord that failed; those that Celery calls itself,
        as they take three arguments, run inside of the transaction. Raises ConnectionLost and DatabaseBusy: then the
        caller rolls back, and may apply the record again."""
        dialect = self.place.database.dialect
        with self._inside(session):
            for entry in record.entries:
                if isinstance(entry, Row):
                    results.store(dialect, session, *entry)
                elif isinstance(entry, NewJob):
                    dialect.enqueue(session, entry)
                elif (error := self._count(session, entry)) is not None:
                    with self.recording() as more, self.publishing(more):
                        self._fail_chord(entry, error)
                    self.apply(session, more)


def _leaves(result: Any) -> Iterator[AsyncResult]:
    for part in result.results:
        if isinstance(part, GroupResult):
            yield from _leaves(part)
        else:
            yield part


def _shaped(result: Any, values: Mapping[str, Any]) -> list[Any]:
    return [_shaped(part, values) if isinstance(part, GroupResult) else values[part.id] for part in result.results]


def _caused(text: str, cause: object) -> ChordError:
    error = ChordError(text)
    error.__cause__ = cause if isinstance(cause, Exception) else None
    return error
