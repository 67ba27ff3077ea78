"""Whoever fires a Celery app's entries: takes the app at its start, and in each transaction looks whether it is still its own.

Messages are made by Celery, outside of any statement, and written all at once beside the cursors. What an entry's own code raises
(a lazy argument, a serializer, a custom schedule) sets that entry aside and no other; what the database says ends the round.
"""

from __future__ import annotations

import copy
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery
from celery.beat import ScheduleEntry

from dbqueue import owners, schedules
from dbqueue.celery_beat import entries as of_app
from dbqueue.celery_beat.broker import connection_of, owner_of
from dbqueue.celery_beat.entries import AppEntry
from dbqueue.clock import SECOND
from dbqueue.database.buffered import Gathered
from dbqueue.database.dialect import Dialect, OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.joined import gathering
from dbqueue.database.tables import Move
from dbqueue.errors import ConfigError, DatabaseError, NotSupported, QueueError, ScheduleNotFound
from dbqueue.runtime.beat import BATCH_JOBS, Fired
from dbqueue.schedules import SET_ASIDE, Entry, Round

if TYPE_CHECKING:
    from dbqueue.celery_beat.scheduler import Scheduler

log = logging.getLogger("dbqueue.beat")

_TRY_AGAIN = 2 * SECOND
TELL_AGAIN = 60.0
"""Seconds between two lines that another version owns the entries."""


class Letter(NamedTuple):
    """One slot's message, before Celery has made it. ``due`` is for people: of a schedule that is asked the slot is where the cursor
    was."""

    slot: int
    due: int
    args: list[Any]
    kwargs: dict[str, Any]


class Due(NamedTuple):
    entry: Entry
    round: Round
    letters: list[Letter]
    error: str | None


class AppSource:
    """The entries of one app as a beat's source. ``scheduler`` makes the messages; ``told`` is called once the app is taken."""

    def __init__(self, scheduler: Scheduler, told: Callable[..., Any] | None = None) -> None:
        self.app: Celery = scheduler.app
        self.owner = owner_of(self.app)
        self._scheduler, self._told = scheduler, told
        self._entries: dict[str, AppEntry] = {}
        self._digest = ""
        self._beat = ""
        self._database: Database | None = None
        self._connection: Any = None
        self._producer: Any = None
        self._tell_at = 0.0

    # -- beginning and end -------------------------------------------------------------------------------------------

    def start(self, database: Database, beat: str) -> None:
        """Takes the app. Raises ConfigError for a broker that is not this database."""
        database.ready()
        self._connect(database)
        self._database, self._beat = database, beat
        self._entries = of_app.read(self.app, self.owner, self._scheduler.read_entries())
        declared = [entry.definition for entry in self._entries.values()]
        self._digest = owners.digest_of(declared)
        database.run(lambda session: owners.take(database.dialect, session, self.owner, beat, declared))
        log.info("beat %s owns the entries of %s: %d", beat, self.owner, len(declared))
        if self._told is not None:
            self._told(sender=self)

    def _connect(self, database: Database) -> None:
        self._connection = connection_of(self.app)
        try:
            self._connection.ensure_connection(max_retries=1)
        except Exception as error:  # kombu has wrapped it
            raise _of_database(error) or error from error
        broker: Database = self._connection.connection.station.database
        if broker.dialect.name != database.dialect.name or broker.database_id != database.database_id:
            raise ConfigError(
                f"the broker of the Celery app {self.owner} is {broker.label}, and this beat works on {database.label}: message and cursor "
                "could not commit together. Start a beat for each"
            )
        self._producer = self._scheduler.Producer(self._connection, auto_declare=False)

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.release()

    # -- in the beat's transaction -----------------------------------------------------------------------------------

    def begin(self, dialect: Dialect, session: OwnSession) -> bool:
        owner = owners.owner_of(dialect, session, self.owner)
        if owner is not None and owner.digest == self._digest:
            return True
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_AGAIN
            who = "nobody" if owner is None else f"{owner.beat}, since {owner.since.isoformat(timespec='seconds')}"
            log.warning(
                "beat %s fires nothing: the entries of %s belong to another version of the code (%s). Stop this beat, or start it "
                "anew to take them back",
                self._beat, self.owner, who,
            )  # fmt: skip
        return False

    def plan(self, entry: Entry, now: int) -> Move:
        if entry.retired:
            return entry.move()
        known = self._entries.get(entry.name)
        if known is None:
            return entry.move(error=_unknown(self.owner))
        last_slot = entry.last_slot if entry.planned is None else max(entry.last_slot, now)
        return entry.move(last_slot, known.next_at(entry, last_slot, now))

    def fire(self, dialect: Dialect, session: OwnSession, entries: Sequence[Entry], now: int) -> list[Fired]:
        assert self._database is not None
        rounds: list[Due] = []
        fired: list[Fired] = []
        letters = 0
        for entry in entries:
            known = self._entries.get(entry.name)
            if entry.retired or known is None:
                fired.append(Fired(entry.move(error=None if entry.retired else _unknown(self.owner)), []))
                continue
            rounds.append(self._due(known, entry, now))
            letters += len(rounds[-1].letters)
            if letters >= BATCH_JOBS:  # the others stay due
                break
        gathered = Gathered(self._database)
        with gathering(gathered):
            fired += [self._send(dialect, session, due, gathered, now) for due in rounds]
        gathered.write(session)
        return fired

    def _due(self, known: AppEntry, entry: Entry, now: int) -> Due:
        """Before the block in which messages are gathered: what an entry's own code does here is none of our transaction's."""
        round, letters = Round([], entry.last_slot, None), []
        try:
            round = known.round(entry, now)
            if entry.active:
                letters = [Letter(slot, self._due_at(known, entry, slot), *known.arguments()) for slot in round.slots]
        except Exception as error:
            return Due(entry, round, [], self._failed(entry.name, error))
        return Due(entry, round, letters, None)

    @staticmethod
    def _due_at(known: AppEntry, entry: Entry, slot: int) -> int:
        return slot if known.spec is not None or entry.next_at is None else entry.next_at

    def _send(self, dialect: Dialect, session: OwnSession, due: Due, gathered: Gathered, now: int) -> Fired:
        entry, round, letters, error = due
        pause = SET_ASIDE
        sent: list[tuple[int, bytes]] = []
        last_slot = entry.last_slot
        for letter in letters:
            before = gathered.jobs
            try:
                task_id = self._publish(
                    self._entries[entry.name], letter, schedules.slot_id(entry.owner, entry.name, letter.slot)
                )
            except Exception as failure:
                trouble = _of_database(failure)
                if trouble is not None:  # our own, or does the entry's code speak to another database?
                    dialect.now(session)
                    pause = _TRY_AGAIN
                gathered.forget_after(before)
                error = self._failed(entry.name, trouble or failure)
                break
            sent.append((letter.due, task_id))
            last_slot = letter.slot
        if error is None:
            return Fired(entry.move(round.last_slot, round.next_at, fired=len(sent)), sent)
        return Fired(entry.move(last_slot, now + pause, fired=len(sent), error=error), sent)

    def _publish(self, known: AppEntry, letter: Letter, slot_id: bytes) -> bytes:
        entry: ScheduleEntry = copy.copy(known.celery)
        entry.args, entry.kwargs = letter.args, letter.kwargs
        # Nothing is tried again here: the beat does so, with a transaction of its own.
        options = {"task_id": str(uuid.UUID(bytes=slot_id)), **known.options, "retry": False}
        options["headers"] = dict(options.get("headers") or {})
        entry.options = options
        self._scheduler.send(entry, self._producer)
        try:
            return uuid.UUID(str(options["task_id"])).bytes
        except ValueError:
            return slot_id

    def _failed(self, name: str, error: Exception) -> str:
        """What is stored and logged: the kind of error and where it was raised, for its text may quote the arguments."""
        frames = traceback.extract_tb(error.__traceback__)
        where = "".join(f"\n  {frame.filename}, line {frame.lineno}, in {frame.name}" for frame in frames)
        log.error("the entry %s of %s was not sent: %s%s", name, self.owner, type(error).__name__, where)
        if isinstance(error, QueueError):
            return f"{type(error).__name__}: {error}"[:500]
        return f"{type(error).__name__} when its message was made; the log of beat {self._beat} says where"

    # -- by hand -----------------------------------------------------------------------------------------------------

    def run_now(self, name: str) -> str:
        """Sends the entry's task now, beside its slots; returns the id. Raises ScheduleNotFound."""
        known = of_app.read(self.app, self.owner, self._scheduler.read_entries()).get(name)
        if known is None:
            raise ScheduleNotFound(f"the Celery app {self.owner} has no entry {name!r}")
        self._entries = {name: known}
        self._connection = connection_of(self.app)
        try:
            self._producer = self._scheduler.Producer(self._connection, auto_declare=False)
            return str(uuid.UUID(bytes=self._publish(known, Letter(0, 0, *known.arguments()), uuid.uuid4().bytes)))
        except Exception as error:
            if (trouble := _of_database(error)) is not None:
                raise trouble from error
            raise NotSupported(f"the entry {name!r} was not sent: {type(error).__name__}") from error
        finally:
            self.close()


def _unknown(owner: str) -> str:
    return f"the Celery app {owner} has no such entry: remove it with `dbqueue schedules remove`"


def _of_database(error: BaseException | None) -> DatabaseError | None:
    """What the database said, wherever in the chain: Celery and kombu wrap it."""
    while error is not None:
        if isinstance(error, DatabaseError):
            return error
        error = error.__cause__ or error.__context__
    return None
