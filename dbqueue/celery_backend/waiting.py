"""Waiting for results: all threads of a process share one connection per database, on which one of them listens for all.

Whoever waits reads first, announces its sleep, and reads again (``database.wakeup`` tells why that misses nothing); a result
that is stored rings only where somebody sleeps. Each consumer has an inbox, and handles in its own thread what is for it. Trouble
with the connection makes waiting slower, not wrong: results are then read twice a second until it is back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

from dbqueue import results
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.wakeup import Listener, Sleeper
from dbqueue.errors import DatabaseError
from dbqueue.runtime.wake import Wake

log = logging.getLogger("dbqueue.results")

READY = frozenset({"SUCCESS", "FAILURE", "REVOKED"})
LOOK_FIRST = 0.002
"""Seconds from falling asleep to the first look whether older transactions have ended; doubled each time."""
TROUBLED_POLL = 0.5
POLL = 5.0
"""Seconds after which results are read though nobody rang."""
LINGER = 30.0
"""Seconds that the listening connection stays open when nobody waits."""


class News(NamedTuple):
    task_id: str
    state: str
    meta: bytes


class Inbox:
    """Of one consumer. ``every_state``: it wants to hear of unfinished states too."""

    def __init__(self) -> None:
        self.news: deque[News] = deque()
        self.every_state = False
        self.seen: dict[str, bytes] = {}


class Hub:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._pid = os.getpid()
        self._lock = threading.Lock()
        """Of ``_waiting``; held for moments."""
        self._waiting: dict[str, WeakSet[Inbox]] = {}
        self._turn = threading.Lock()
        """Whose holder uses the connection and reads for all."""
        self._changed = threading.Condition()
        self._wake = Wake()
        self._session: OwnSession | None = None  # SQLite's, whose data_version is looked at
        self._sleeper: Sleeper | None = None
        self._bells: frozenset[str] = frozenset()
        self._look_pause = LOOK_FIRST
        self._troubled = False
        self._idle_since = time.monotonic()
        self._closer: threading.Thread | None = None

    # -- who waits ---------------------------------------------------------------------------------------------------

    def add(self, task_id: str, inbox: Inbox) -> None:
        with self._lock:
            self._waiting.setdefault(task_id, WeakSet()).add(inbox)
        if results.bell(task_id) not in self._bells:
            self._wake.ring()  # whoever listens does not listen for this one yet

    def remove(self, task_id: str, inbox: Inbox) -> None:
        with self._lock:
            inbox.seen.pop(task_id, None)
            inboxes = self._waiting.get(task_id)
            if inboxes is not None:
                inboxes.discard(inbox)
                if not inboxes:
                    del self._waiting[task_id]

    def _wanted(self) -> list[str]:
        with self._lock:
            for task_id in [task_id for task_id, inboxes in self._waiting.items() if not inboxes]:
                del self._waiting[task_id]
            return list(self._waiting)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, inbox: Inbox, seconds: float) -> None:
        """Until something is in the inbox, or the time is over."""
        until = time.monotonic() + max(0.0, seconds)
        while not inbox.news:
            if self._turn.acquire(blocking=False):
                try:
                    self._read_for_all(inbox, until)
                finally:
                    with self._changed:
                        self._turn.release()
                        self._changed.notify_all()
            else:
                with self._changed:
                    if not inbox.news and self._turn.locked():
                        self._changed.wait(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                return

    def _read_for_all(self, inbox: Inbox, until: float) -> None:
        while True:
            self._read()
            if inbox.news or time.monotonic() >= until:
                break
            self._sleep(until)
        self._rest()

    def _read(self) -> None:
        wanted = self._wanted()
        try:
            found = self._database.read(lambda session: results.load(self._database.dialect, session, wanted))
        except DatabaseError as error:
            self._trouble(error)
            return
        delivered = False
        with self._lock:
            for task_id, (state, meta) in found.items():
                for inbox in list(self._waiting.get(task_id, ())):
                    if state in READY:
                        self._waiting[task_id].discard(inbox)
                    elif not inbox.every_state or inbox.seen.get(task_id) == meta:
                        continue
                    else:
                        inbox.seen[task_id] = meta
                    inbox.news.append(News(task_id, state, meta))
                    delivered = True
        if delivered:
            with self._changed:
                self._changed.notify_all()

    def _sleep(self, until: float) -> None:
        """Returns when it is time to read again."""
        left = max(0.0, until - time.monotonic())
        try:
            with self._database.errors():
                sleeper = self._listening()
                if sleeper is None:
                    self._wake.wait(min(left, TROUBLED_POLL), None)
                elif not sleeper.announced:
                    sleeper.announce()
                    self._look_pause = LOOK_FIRST
                    if not sleeper.announced:  # a producer holds the gate at this moment
                        self._wake.wait(min(left, LOOK_FIRST), None)
                elif not sleeper.settled:
                    if not self._wake.wait(min(left, self._look_pause), sleeper):
                        sleeper.look()
                    self._look_pause = min(self._look_pause * 2, 1.0)
                else:
                    self._wake.wait(min(left, POLL), sleeper)
        except DatabaseError as error:
            self._trouble(error)
            self._wake.wait(min(left, TROUBLED_POLL), None)

    def _listening(self) -> Sleeper | None:
        """A connection that hears the bells of all that is waited for; None: there is to be none."""
        bells = frozenset(results.bell(task_id) for task_id in self._wanted())
        if self._sleeper is not None and (bells <= self._bells or not isinstance(self._sleeper, Listener)):
            return self._sleeper
        if not self._database.dialect.listens:
            self._session = self._database.open_session()
            self._sleeper = self._database.sleeper(self._session, ())
        elif isinstance(self._sleeper, Listener):
            self._sleeper.also(tuple(bells - self._bells))
            self._bells |= bells
        else:
            self._sleeper, self._bells = self._database.listener(tuple(bells)), bells
        self._troubled = False
        return self._sleeper

    def _trouble(self, error: DatabaseError) -> None:
        if not self._troubled:
            self._troubled = True
            log.warning("waiting for results: %s; reading twice a second until it is back", error)
        self._close_connection()

    # -- not waiting -------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Nobody needs to ring while nobody waits; after a while the connection is closed."""
        if self._sleeper is None or self._wanted():
            return
        self._idle_since = time.monotonic()
        try:
            with self._database.errors():
                self._sleeper.wake()
        except DatabaseError as error:
            self._trouble(error)
            return
        if self._closer is None and self._database.dialect.listens:
            self._closer = threading.Thread(target=self._close_idle, name="dbqueue-results-idle", daemon=True)
            self._closer.start()

    def _close_idle(self) -> None:
        while True:
            time.sleep(max(0.1, self._idle_since + LINGER - time.monotonic()))
            with self._turn:
                if not self._wanted() and time.monotonic() >= self._idle_since + LINGER:
                    self._close_connection()
                    self._closer = None
                    return

    def _close_connection(self) -> None:
        sleeper, self._sleeper = self._sleeper, None
        session, self._session = self._session, None
        self._bells = frozenset()
        for ours in (sleeper, session):
            if ours is not None:
                with suppress(Exception):
                    ours.close()
