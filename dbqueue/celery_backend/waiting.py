"""Waiting for results: all threads of a process share one connection per database, on which one of them listens for all.

Whoever waits says so, reads, and only then sleeps; the one that listens announces the sleep and reads again (``database.wakeup``
tells why that misses nothing); a result that is stored rings only where somebody sleeps. Each consumer has an inbox, and what is in
it is handled by a thread that waits on it. Trouble with the connection makes waiting slower, not wrong: results are then read
twice a second until it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
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
LOOK_FIRST, LOOK_LAST = 0.002, 1.0
"""Seconds from falling asleep to the first look whether older transactions have ended; doubled each time, up to the second."""
TROUBLED_POLL = 0.5
POLL = 5.0
"""Seconds after which results are read though nobody rang."""
AWAKE = 1.0
"""Seconds after the last wait in which results still ring: who calls one task after the other announces itself only once."""
LINGER = 30.0
"""Seconds that the listening connection stays open when nobody waits."""


class News(NamedTuple):
    task_id: str
    state: str
    meta: bytes


class Inbox:
    """Of one consumer; several threads may wait on it (``result_backend_thread_safe``, or a result made in another thread)."""

    def __init__(self) -> None:
        self.news: deque[News] = deque()
        self.seen: dict[str, bytes] = {}
        """The last unfinished state that was told of a task."""
        self.curious = 0
        """How many of those who wait want to hear of unfinished states too."""
        self.waiters = 0
        self.handled = 0
        self._mine = threading.local()

    def due(self) -> bool:
        """Whether this thread has something to do: news, or results that another thread handled since it last looked."""
        return bool(self.news) or self.handled != getattr(self._mine, "handled", 0)

    def take(self) -> News | None:
        """None: there is none, or another thread took the last of it."""
        try:
            return self.news.popleft()
        except IndexError:
            return None

    def look(self) -> bool:
        due, self._mine.handled = self.due(), self.handled
        return due


class Hub:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        """Of what is waited for; held for moments. Never taken by ``remove``, which the garbage collector calls at any moment."""
        self._waiting: dict[str, WeakSet[Inbox]] = {}
        self._hot: dict[str, int] = {}
        """Those that somebody sleeps for now, with how many do. The others have been asked for, and may never be."""
        self._fresh: set[str] = set()
        """Those that nobody has read since they were added."""
        self._removed: deque[tuple[str, Inbox]] = deque()
        self._turn = threading.Lock()
        """Whose holder uses the connection and reads for all."""
        self._changed = threading.Condition()
        self._wake = Wake()
        self._session: OwnSession | None = None  # SQLite's, whose data_version is looked at
        self._sleeper: Sleeper | None = None
        self._bells: frozenset[str] = frozenset()
        self._look_pause = LOOK_FIRST
        self._unread, self._read_at, self._cold_from = False, time.monotonic(), 0
        self._troubled = self._pause = False
        self._awake_until = 0.0
        self._closer: threading.Thread | None = None

    # -- who waits ---------------------------------------------------------------------------------------------------

    def add(self, task_id: str, inbox: Inbox) -> None:
        with self._lock:
            self._add(task_id, inbox)

    def _add(self, task_id: str, inbox: Inbox) -> None:
        self._forget_removed()
        first = not self._waiting
        self._waiting.setdefault(task_id, WeakSet()).add(inbox)
        self._fresh.add(task_id)
        if first or results.bell(task_id) not in self._bells:
            self._wake.ring()  # whoever listens does not listen for this one yet

    def remove(self, task_id: str, inbox: Inbox) -> None:
        self._removed.append((task_id, inbox))

    def _forget_removed(self) -> None:
        while self._removed:
            task_id, inbox = self._removed.popleft()
            inbox.seen.pop(task_id, None)
            inboxes = self._waiting.get(task_id)
            if inboxes is not None:
                inboxes.discard(inbox)
                self._drop_if_left(task_id, inboxes)

    def _drop_if_left(self, task_id: str, inboxes: WeakSet[Inbox]) -> None:
        if not inboxes:
            self._waiting.pop(task_id, None)
            self._fresh.discard(task_id)

    def begin(self, task_ids: Iterable[str], inbox: Inbox, curious: bool) -> None:
        """Somebody is going to sleep for these; it has to ``end`` that."""
        with self._lock:
            inbox.curious += curious
            for task_id in task_ids:
                self._hot[task_id] = self._hot.get(task_id, 0) + 1
                if inbox not in self._waiting.get(task_id, ()):  # a result that was asked for before a fork
                    self._add(task_id, inbox)

    def end(self, task_ids: Iterable[str], inbox: Inbox, curious: bool) -> None:
        with self._lock:
            inbox.curious -= curious
            for task_id in task_ids:
                left = self._hot.pop(task_id, 1) - 1
                if left:
                    self._hot[task_id] = left

    def was_read(self, task_ids: Iterable[str]) -> None:
        """By the caller itself, after it had added them."""
        with self._lock:
            self._fresh.difference_update(task_ids)

    def handled(self, inbox: Inbox) -> None:
        """What was in the inbox; other threads that wait on it look for themselves whether that was for them."""
        with self._lock:
            inbox.handled += 1
            others = inbox.waiters
        if others:
            with self._changed:
                self._changed.notify_all()
            self._wake.ring()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, inbox: Inbox, seconds: float) -> bool:
        """Until something is in the inbox or was handled by another thread (True), or the time is over (False)."""
        until = time.monotonic() + max(0.0, seconds)
        with self._lock:
            inbox.waiters += 1
        try:
            while not inbox.due():
                if self._turn.acquire(blocking=False):
                    try:
                        self._read_for_all(inbox, until)
                    finally:
                        self._give_turn()
                else:
                    with self._changed:
                        if not inbox.due() and self._turn.locked():
                            self._changed.wait(max(0.0, until - time.monotonic()))
                if time.monotonic() >= until:
                    break
        finally:
            with self._lock:
                inbox.waiters -= 1
        return inbox.look()

    def _give_turn(self) -> None:
        with self._changed:
            self._turn.release()
            self._changed.notify_all()

    def _read_for_all(self, inbox: Inbox, until: float) -> None:
        while True:
            if self._unread or self._fresh or time.monotonic() - self._read_at >= POLL:
                self._read()
            if inbox.due() or time.monotonic() >= until:
                return
            try:
                self._unread |= self._sleep(until)
            except BaseException:  # an interrupt may have come after the bell
                self._unread = True
                raise

    def _wanted(self) -> list[str]:
        """What somebody sleeps for, and by turns some of the others: what was asked for and never waited for must cost little."""
        with self._lock:
            self._forget_removed()
            for task_id, inboxes in list(self._waiting.items()):
                self._drop_if_left(task_id, inboxes)
            hot = [task_id for task_id in self._waiting if task_id in self._hot]
            if len(hot) == len(self._waiting):
                return hot
            cold = [task_id for task_id in self._waiting if task_id not in self._hot]
            fresh = [task_id for task_id in cold if task_id in self._fresh][: results.AT_ONCE]
            if self._cold_from >= len(cold):
                self._cold_from = 0
            some = islice(cold, self._cold_from, self._cold_from + results.AT_ONCE)
            self._cold_from += results.AT_ONCE
            return list(dict.fromkeys([*hot, *fresh, *some]))

    def _read(self) -> None:
        wanted = self._wanted()
        try:
            self._database.ready()
            found = self._database.read(lambda session: results.load(self._database.dialect, session, wanted))
        except DatabaseError as error:
            self._trouble(error)
            return
        self._unread, self._read_at = False, time.monotonic()
        delivered = False
        with self._lock:
            self._fresh.difference_update(wanted)
            for task_id, (state, meta) in found.items():
                for inbox in list(self._waiting.get(task_id, ())):
                    if state in READY:
                        self._waiting[task_id].discard(inbox)
                    elif not inbox.curious or inbox.seen.get(task_id) == meta:
                        continue
                    else:
                        inbox.seen[task_id] = meta
                    inbox.news.append(News(task_id, state, meta))
                    delivered = True
        if self._troubled and (self._sleeper is not None or not self._database.notify):
            self._troubled = False
            log.info("waiting for results: the database rings again")
        if delivered:
            with self._changed:
                self._changed.notify_all()

    def _sleep(self, until: float) -> bool:
        """Returns when it is time to do something; True: to read again."""
        left = max(0.0, until - time.monotonic())
        if self._pause:
            self._pause = False
            self._wake.wait(min(left, TROUBLED_POLL), None)
            return True
        if not self._waiting:  # a greenlet that waits for whatever may come
            self._wake.wait(left, None)
            return False
        self._awake_until = time.monotonic() + AWAKE
        try:
            with self._database.errors():
                return self._sleep_on(self._sleeper, left)
        except DatabaseError as error:
            self._trouble(error)
            return True

    def _sleep_on(self, sleeper: Sleeper | None, left: float) -> bool:
        if not self._database.notify and self._database.dialect.listens:
            self._wake.wait(min(left, TROUBLED_POLL), None)
            return True
        bells = self._missing_bells()
        if sleeper is None or bells:
            self._listen(bells)
            return True
        if not sleeper.announced:
            sleeper.announce()
            if sleeper.announced:
                self._look_pause = LOOK_FIRST
            else:  # a producer holds the gate at this moment, or died holding it
                self._wake.wait(min(left, self._look_pause), None)
                self._look_pause = min(self._look_pause * 2, TROUBLED_POLL)
            return True
        if not sleeper.settled:
            if not self._wake.wait(min(left, self._look_pause), sleeper):
                sleeper.look()
            self._look_pause = min(self._look_pause * 2, LOOK_LAST)
            return True
        return self._wake.wait(min(left, max(0.0, self._read_at + POLL - time.monotonic())), sleeper)

    def _missing_bells(self) -> frozenset[str]:
        if len(self._bells) == results.BELLS or not self._database.dialect.listens:
            return frozenset()
        with self._lock:
            return frozenset(map(results.bell, self._waiting)) - self._bells

    def _listen(self, bells: frozenset[str]) -> None:
        if isinstance(self._sleeper, Listener):
            self._sleeper.also(tuple(bells))
        elif self._database.dialect.listens:
            self._sleeper = self._database.listener(tuple(bells))
            self._watch_idleness()
        else:
            self._session = self._database.open_session()
            self._sleeper = self._database.sleeper(self._session, ())
        self._bells |= bells

    def _trouble(self, error: DatabaseError) -> None:
        if not self._troubled:
            log.warning("waiting for results: %s; reading twice a second until it is back", error)
        self._troubled = self._pause = True
        self._close_connection()

    # -- not waiting -------------------------------------------------------------------------------------------------

    def _watch_idleness(self) -> None:
        if self._closer is None:
            self._closer = threading.Thread(target=self._when_idle, name="dbqueue-results-idle", daemon=True)
            self._closer.start()

    def _when_idle(self) -> None:
        """Nobody needs to ring while nobody waits; after a while the connection is closed."""
        while True:
            time.sleep(max(0.1, min(AWAKE, self._awake_until + LINGER - time.monotonic())))
            if time.monotonic() < self._awake_until or not self._turn.acquire(blocking=False):
                continue
            try:
                if self._sleeper is None or time.monotonic() >= self._awake_until + LINGER:
                    self._close_connection()
                    self._closer = None
                    return
                try:
                    with self._database.errors():
                        self._sleeper.wake()
                except DatabaseError:
                    self._close_connection()
            finally:
                self._give_turn()

    def _close_connection(self) -> None:
        sleeper, self._sleeper = self._sleeper, None
        session, self._session = self._session, None
        self._bells = frozenset()
        for ours in (sleeper, session):
            if ours is not None:
                with suppress(Exception):
                    ours.close()
