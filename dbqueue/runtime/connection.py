"""The worker's own connections: one on which it works, one on which it listens; lost, and made again.

The first failure of a series is told by DatabaseTrouble and its end by DatabaseBack; the tries between them are
silent and further and further apart. Nothing else in the worker stops meanwhile: jobs run on, their outcomes wait.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable

from dbqueue import events
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.wakeup import Sleeper
from dbqueue.errors import DatabaseBusy, QueueError
from dbqueue.runtime.running import NEVER

RECONNECT_FIRST, RECONNECT_MOST = 0.1, 5.0
LOOK_FIRST = 0.002
"""Seconds from falling asleep to the first look whether older transactions have ended; doubled each time, up to the
poll."""
SECOND_RELEASE = 2.0
"""Seconds after a reconnect until unknown claims are looked for once more: the server may have gone on with a turn
that we gave up."""


class Connection:
    def __init__(self, database: Database, worker: str, queues: tuple[str, ...], *, poll: float, listen: bool) -> None:
        self._database, self._dialect = database, database.dialect
        self._worker, self._queues, self._poll = worker, queues, poll
        self.session: OwnSession | None = None
        self.sleeper: Sleeper | None = None
        self.news = True
        """Jobs may have been written that nobody rang for: look for them."""
        self._trouble_since: float | None = None
        self._tries = 0
        self.answered_at = 0.0
        """When the database last answered."""
        self._connect_at = 0.0
        self._release_at = NEVER
        self._listen_at = 0.0 if listen else NEVER
        self._listen_tries = 0
        self._look_at, self._look_pause = 0.0, LOOK_FIRST

    @property
    def next_at(self) -> float:
        """When ``ready`` has something to do that nothing else announces."""
        if self.session is None:
            return self._connect_at
        return min(self._release_at, self._listen_at if self.sleeper is None else NEVER)

    # -- the session -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first connection. Raises: a worker whose database is not there at its start says so and ends."""
        self.session = self._database.open_session()
        self._database.ready(self.session)
        self.worked()

    def ready(self, known: Callable[[], list[bytes]]) -> bool:
        """Whether there is a session to work on; makes it when it is time to try. ``known``: ids of the claims that
        this worker knows of. Rows that the database thinks it holds beside them came in an answer that was lost: they
        are handed back."""
        now = time.monotonic()
        try:
            if self.session is None:
                if now < self._connect_at:
                    return False
                self.session = self._database.open_session()
                if self._trouble_since is not None:
                    self._back(known, now)
            elif now >= self._release_at:
                self._release_at = now + SECOND_RELEASE
                self._release(known)
                self._release_at = NEVER
        except DatabaseBusy as error:
            if self.session is None or self._trouble_since is not None:
                self.lost(error)
        except QueueError as error:
            self.lost(error)
        if self.session is None:
            return False
        if self.sleeper is None and now >= self._listen_at:
            self._listen()
        return True

    def _back(self, known: Callable[[], list[bytes]], now: float) -> None:
        released = self._release(known)
        since, self._trouble_since = self._trouble_since or now, None
        self._release_at = now + SECOND_RELEASE
        self.news = True
        events.emit(events.DatabaseBack(self._worker, time.monotonic() - since, released))

    def _release(self, known: Callable[[], list[bytes]]) -> int:
        assert self.session is not None
        with self._database.errors():
            return self._dialect.release_unknown(self.session, self._worker, known())

    def worked(self) -> None:
        """The database answered: the next trouble is a new one."""
        self._tries, self.answered_at = 0, time.monotonic()

    def lost(self, error: QueueError) -> None:
        """Closes what is left and plans the next try."""
        session, self.session = self.session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()
        self.stop_listening()
        now = time.monotonic()
        if self._listen_at != NEVER:
            self._listen_at = now
        if self._trouble_since is None:
            self._trouble_since = now
            events.emit(events.DatabaseTrouble(self._worker, f"{type(error).__name__}: {error}"))
        pause = min(RECONNECT_MOST, RECONNECT_FIRST * 2 ** min(self._tries, 10))
        self._tries += 1
        self._connect_at = now + pause * random.uniform(0.5, 1.0)

    def close(self) -> None:
        self.stop_listening(for_good=True)
        session, self.session = self.session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()

    def listen_to(self, queues: tuple[str, ...]) -> None:
        """The names to be woken for are other ones now; an empty tuple: none."""
        if queues != self._queues:
            self._queues = queues
            self.stop_listening()
            self._listen_at = 0.0 if queues else NEVER

    # -- listening and sleeping --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self.session is not None
        try:
            with self._database.errors():
                self.sleeper = self._database.sleeper(self.session, self._queues)
        except QueueError:  # polling serves meanwhile
            self._listen_later()
            return
        if self.sleeper is None:  # switched off
            self._listen_at = NEVER
        self._look_at, self._look_pause = 0.0, LOOK_FIRST
        self.news = True

    def _listen_later(self) -> None:
        pause = min(RECONNECT_MOST, RECONNECT_FIRST * 2 ** min(self._listen_tries, 10))
        self._listen_tries += 1
        self._listen_at = time.monotonic() + pause

    def stop_listening(self, *, for_good: bool = False) -> None:
        sleeper, self.sleeper = self.sleeper, None
        if for_good:
            self._listen_at = NEVER
        if sleeper is not None:
            with contextlib.suppress(Exception):
                sleeper.close()

    def attempt(self, call: Callable[[], object]) -> bool:
        """Something that needs the listening connection. False: it is gone, and will be made again."""
        try:
            call()
            return True
        except Exception as error:
            if self._dialect.classify(error) is None:
                raise
            self.stop_listening()
            self._listen_later()
            return False

    def fall_asleep(self, now: float) -> float:
        """After a claim that found nothing: announces the sleep, then looks whether every transaction that was open
        at the announcement has ended (see ``wakeup``). Returns when to look for jobs again; ``now``: at once; NEVER:
        whoever writes one rings."""
        sleeper = self.sleeper
        if sleeper is None or sleeper.settled:
            return NEVER
        if now < self._look_at:
            return self._look_at
        if not sleeper.announced and not self.attempt(sleeper.announce):
            return NEVER
        if sleeper.announced and not self.attempt(sleeper.look):
            return NEVER
        self._listen_tries = 0
        self._look_at = now + self._look_pause
        self._look_pause = min(self._look_pause * 2, self._poll)
        return now if sleeper.announced else self._look_at

    def wake(self) -> None:
        """No slot is idle: nobody needs to ring."""
        self._look_at, self._look_pause = 0.0, LOOK_FIRST
        if self.sleeper is not None:
            self.attempt(self.sleeper.wake)
