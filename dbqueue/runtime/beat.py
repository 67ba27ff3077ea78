"""A beat: looks when the next schedule is due, and fires what is due. Any number of them may run on one database.

Idle, it reads two index entries once a poll (and a second one once a minute, whether the clock went back). When something is due it
takes up to ``BATCH`` schedules that no other beat holds, writes their jobs and moves their cursors in one transaction. A
lost COMMIT needs no answer: the next look reads the cursors (D16). Only facts that were committed are told.
"""

from __future__ import annotations

import logging
import queue as queues
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from dbqueue import events, ids, schedules
from dbqueue.clock import to_datetime
from dbqueue.database.dialect import Dialect, OwnSession
from dbqueue.database.engine import Database, roll_back
from dbqueue.database.tables import Move, NewJob
from dbqueue.errors import ConnectionLost, DatabaseBusy, DatabaseError, QueueError
from dbqueue.queue import DBQueue
from dbqueue.runtime.connection import Connection
from dbqueue.runtime.log import log_events
from dbqueue.runtime.shutdown import stop_on_signals
from dbqueue.schedules import Entry

log = logging.getLogger("dbqueue.beat")

BATCH = 500
"""Schedules of one transaction."""
BATCH_JOBS = 2_000
"""Jobs of one transaction, and what its last schedule brings beyond that."""
POLL = 1.0
"""Seconds between two looks of an idle beat: a new schedule may be due sooner than all the others."""
LOOK_BACK = 60.0
"""Seconds between two looks whether a cursor lies in the future."""
BUSY_PAUSE = 0.1
BUSY_ASIDE = 5_000_000
"""Microseconds until a schedule is tried again whose job waited for somebody's lock."""


class Fired(NamedTuple):
    """What one schedule's round comes to: its move, and of each job that was written its slot and id."""

    move: Move
    jobs: list[tuple[int, bytes]]


class _Refused(Exception):
    """The database did not take what several schedules came to; which of them is at fault, nobody knows yet."""


class Source(Protocol):
    """Where the entries of one owner get their jobs from. ``fire`` and ``plan`` run in the beat's transaction."""

    owner: str

    def start(self, database: Database, beat: str) -> None:
        """Once, before the first look. Raises ConfigError, and what the database says: then the beat ends."""

    def close(self) -> None: ...
    def begin(self, dialect: Dialect, session: OwnSession) -> bool:
        """Whether this source may fire now: first in each transaction."""

    def plan(self, entry: Entry, now: int) -> Move: ...
    def fire(self, dialect: Dialect, session: OwnSession, entries: Sequence[Entry], now: int) -> list[Fired]: ...


class Stored:
    """The schedules that hold themselves what they enqueue."""

    owner = schedules.OWN

    def start(self, database: Database, beat: str) -> None: ...
    def close(self) -> None: ...
    def begin(self, dialect: Dialect, session: OwnSession) -> bool:
        return True

    def plan(self, entry: Entry, now: int) -> Move:
        return schedules.plan(entry, now)

    def fire(self, dialect: Dialect, session: OwnSession, entries: Sequence[Entry], now: int) -> list[Fired]:
        rounds: list[tuple[Move, list[NewJob]]] = []
        new: list[NewJob] = []
        for entry in entries:
            rounds.append(schedules.fire(entry, now))
            new += rounds[-1][1]
            if len(new) >= BATCH_JOBS:  # the others stay due
                break
        written = dialect.insert_due(session, new)
        fired = []
        for move, jobs in rounds:
            done = [(job.sequence or 0, job.id) for job in jobs if job.id in written]
            fired.append(Fired(replace(move, fired=len(done)), done))
        return fired


class Beat:
    """``step`` does what is due and returns the seconds until it wants to be called again; it raises nothing that a later step may
    cure. Not thread-safe, but for ``stop``."""

    def __init__(
        self,
        database: Database,
        sources: Sequence[Source] = (),
        *,
        name: str,
        stored: Source | None = None,
        poll: float = POLL,
    ) -> None:
        self.database, self.dialect, self.name = database, database.dialect, name
        self._sources = [stored or Stored(), *sources]
        self._owners = [source.owner for source in self._sources]
        self._poll = poll
        self._connection = Connection(database, name, (), poll=poll, listen=False, claims=False)
        self._stopped = False
        self._bell: queues.SimpleQueue[None] = queues.SimpleQueue()  # safe in a signal handler, which an Event is not
        self._look_back_at = 0.0
        self._quarantined: set[tuple[str, str]] = set()
        self.fired = 0
        """Jobs that this beat wrote."""

    def start(self) -> None:
        """Raises what the database says: a beat whose database is not there at its start ends."""
        try:
            self._connection.start()
            for source in self._sources:
                source.start(self.database, self.name)
        except BaseException:
            self._close()
            raise
        events.emit(events.BeatStarted(self.name, self.database.label))

    def close(self) -> None:
        self._close()
        events.emit(events.BeatStopped(self.name, self.fired))

    def _close(self) -> None:
        for source in self._sources:
            source.close()
        self._connection.close()

    def stop(self, reason: str = "asked to stop") -> None:
        """From any thread or a signal handler. The second call cuts a connection that does not answer."""
        if self._stopped:
            self._connection.hurry()
        self._stopped = True
        self._bell.put(None)

    @property
    def stopped(self) -> bool:
        return self._stopped

    def run(self) -> None:
        """Steps until ``stop``."""
        self.start()
        try:
            while not self._stopped:
                with suppress(queues.Empty):
                    self._bell.get(timeout=self.step())
        finally:
            self.close()

    def step(self) -> float:
        connection = self._connection
        if not connection.ready(list):
            return max(0.0, connection.next_at - time.monotonic())
        assert connection.session is not None
        try:
            with self.database.errors():
                pause = self._step(connection.session)
        except DatabaseBusy as error:
            log.debug("beat %s: %s", self.name, error)
            return BUSY_PAUSE
        except DatabaseError as error:
            connection.lost(error)
            return max(0.0, connection.next_at - time.monotonic())
        connection.worked()
        return pause

    def _step(self, session: OwnSession) -> float:
        now, looks = schedules.look(self.dialect, session, self._owners)
        if time.monotonic() >= self._look_back_at:
            self._look_back_at = time.monotonic() + LOOK_BACK
            if ahead := schedules.ahead(self.dialect, session, self._owners, now):
                events.emit(events.CursorsAhead(self.name, tuple(ahead)))
        again, soonest = False, now + round(self._poll * 1_000_000)
        for source, look in zip(self._sources, looks, strict=True):
            if look.unplanned:
                again |= self._plan(session, source)
            if look.next_at is not None and look.next_at <= now:
                again |= self._fire(session, source)
            elif look.next_at is not None:
                soonest = min(soonest, look.next_at)
        return 0.0 if again else (soonest - now) / 1_000_000

    def _plan(self, session: OwnSession, source: Source) -> bool:
        def plan() -> list[Fired]:
            if not source.begin(self.dialect, session):
                return []
            now = self.dialect.now(session)
            entries = schedules.unplanned(self.dialect, session, source.owner, BATCH)
            return self._moved(session, [Fired(source.plan(entry, now), []) for entry in entries])

        return bool(self._in_transaction(session, plan))

    def _fire(self, session: OwnSession, source: Source) -> bool:
        """True: there may be more. A batch that the database refuses is tried one by one, so that one schedule never keeps the
        others from firing."""
        try:
            return self._fire_some(session, source, BATCH)
        except _Refused as refused:
            log.debug("beat %s: a batch was refused (%s); one by one", self.name, refused)
        return all(self._fire_some(session, source, 1) for _ in range(BATCH) if not self._stopped)

    def _fire_some(self, session: OwnSession, source: Source, limit: int) -> bool:
        entries: list[Entry] = []

        def fire() -> list[Fired]:
            if not source.begin(self.dialect, session):
                return []
            now = self.dialect.now(session)
            entries.extend(schedules.due(self.dialect, session, source.owner, now, limit))
            return self._moved(session, source.fire(self.dialect, session, entries, now)) if entries else []

        try:
            return bool(self._in_transaction(session, fire))
        except ConnectionLost:
            raise
        except (
            QueueError
        ) as error:  # DatabaseBusy, too: an open transaction may hold the key of a job, for as long as it likes
            if not entries:
                raise
            if len(entries) > 1:
                raise _Refused(type(error).__name__) from error
            self._set_aside(session, entries[0], error)
            return True

    def _set_aside(self, session: OwnSession, entry: Entry, error: QueueError) -> None:
        """Its cursor stays, so nothing is lost: it is tried again later, and the others go on."""

        def note() -> list[Fired]:
            pause = BUSY_ASIDE if isinstance(error, DatabaseBusy) else schedules.SET_ASIDE
            later = self.dialect.now(session) + pause
            text = f"{type(error).__name__}: {error}"[:500]
            return self._moved(session, [Fired(entry.move(next_at=later, error=text), [])])

        self._in_transaction(session, note)

    def _moved(self, session: OwnSession, fired: list[Fired]) -> list[Fired]:
        moved = self.dialect.move_cursors(session, [one.move for one in fired]) if fired else 0
        if moved != len(fired):  # whoever writes to a row waits for our lock: no ordinary program comes here
            raise DatabaseBusy("schedules changed while they were fired")
        return fired

    def _in_transaction(self, session: OwnSession, verb: Callable[[], list[Fired]]) -> list[Fired]:
        with self.database.errors():
            session.begin()
            try:
                fired = verb()
                session.commit()
            except BaseException:
                roll_back(session)
                raise
        for one in fired:
            self._tell(one)
        return fired

    def _tell(self, one: Fired) -> None:
        move = one.move
        self.fired += len(one.jobs)
        for slot, job_id in one.jobs:
            events.emit(events.ScheduleFired(move.owner, move.name, to_datetime(slot), ids.as_uuid(job_id)))
        if move.error is None:
            self._quarantined.discard((move.owner, move.name))
        elif (move.owner, move.name) not in self._quarantined:  # once, and not each minute
            self._quarantined.add((move.owner, move.name))
            events.emit(events.ScheduleBroken(move.owner, move.name, move.error))


def run_beat(queue: DBQueue, sources: Sequence[Source] = (), *, name: str | None = None, poll: float = POLL) -> int:
    """Runs one beat in this process until SIGTERM or SIGINT. What is being fired is committed first; a second signal gives up a
    database that does not answer. Returns the exit code. Raises ScheduleConflict (D16) and, at its start only, ConnectionLost."""
    database = queue.database
    database.ready()
    for other in queue.start_schedules():
        log.warning(
            "schedule %s was declared in code, and this code does not have it: `dbqueue schedules remove` ends it",
            other,
        )
    beat = Beat(database, sources, name=name or ids.worker_id(socket.gethostname()), poll=poll)
    with log_events(), stop_on_signals(beat.stop):
        beat.run()
    return 0
