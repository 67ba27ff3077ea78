"""The worker's own connections: one on which it works, one on which it listens; lost, and made again.

The first failure of a series is told by DatabaseTrouble and its end by DatabaseBack; the tries between them are
silent and further and further apart. The end is a turn that succeeded: a server that lets everybody in and refuses to
write is not back. Nothing else in the worker stops meanwhile: jobs run on, their outcomes wait.

What may keep a caller waiting is kept from the loop, which has timeouts and signals to watch: a connection is made in
a thread of its own, and one whose server stopped answering is cut by another.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from dbqueue import events
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import Held
from dbqueue.database.wakeup import Sleeper
from dbqueue.errors import DatabaseBusy, QueueError
from dbqueue.runtime.running import NEVER

RECONNECT_FIRST, RECONNECT_MOST = 0.1, 5.0
CLAIM_ANYWAY = 5.0
"""Seconds after which an idle worker claims even if nothing told it to."""
SWEEP_PAUSE = 0.02
"""Seconds until a claim that looked only beyond its low-water marks, and found little, is followed by one that looks
everywhere."""
LOOK_FIRST = 0.002
"""Seconds from falling asleep to the first look whether older transactions have ended; doubled each time, up to the
poll."""
SECOND_RELEASE = 2.0
"""Seconds after a reconnect until unknown claims are looked for once more: the server may have gone on with a turn
that we gave up."""


RELAPSE = 1.0
"""Seconds within which new trouble is taken for the old one, which then has to be gone for as long."""
SHORTEST_PATIENCE, LONGEST_PATIENCE, HURRIED_PATIENCE = 5.0, 30.0, 2.0
"""Seconds without an answer after which a connection is given up: half a lease, so that what is held can still be
renewed on another one, but not so few that a busy server is left in the middle of its work."""


class Opening:
    """Something to connect to, asked for in a thread: a host that vanished takes ten seconds to be noticed."""

    AT_ONCE, LOOK = 0.05, 0.02
    """Seconds to wait for it, and until the next look."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._done, self._lock = make, threading.Event(), threading.Lock()
        self._made: Any = None
        self._error: BaseException | None = None
        self._wanted = True
        threading.Thread(target=self._run, name="dbqueue-connect", daemon=True).start()
        self._done.wait(self.AT_ONCE)

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:  # raised by ``take``
            self._error = error
        else:
            with self._lock:
                self._made = made
                if not self._wanted:
                    self._close()
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def take(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._made

    def drop(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._wanted = False
            self._close()

    def _close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            with contextlib.suppress(Exception):
                made.close()


class Watch:
    """Cuts a connection whose server took a statement and does not answer. The kernel tells of a host that vanished, not of
    one that hangs, nor of a proxy that goes on acknowledging for it."""

    EVERY = 1.0

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.gave_up = False
        self._watched: list[tuple[Any, socket.socket]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, asking: Any) -> None:
        """``asking`` has ``asked_at`` and ``connection``. The socket is a second handle of the same: a number could be another
        file's by the time it is used."""
        self._watched.append((asking, socket.socket(fileno=os.dup(asking.connection.fileno()))))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dbqueue-watch", daemon=True)
            self._thread.start()

    def remove(self, asking: Any) -> None:
        for entry in [entry for entry in self._watched if entry[0] is asking]:
            self._watched.remove(entry)
            entry[1].close()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self.EVERY)

    def _run(self) -> None:
        while not self._ended.wait(min(self.EVERY, self.patience / 4)):
            for asking, handle in list(self._watched):
                if time.monotonic() - asking.asked_at > self.patience:
                    self.gave_up = True
                    with contextlib.suppress(OSError):
                        handle.shutdown(socket.SHUT_RDWR)


class Connection:
    def __init__(
        self,
        database: Database,
        worker: str,
        queues: tuple[str, ...],
        *,
        poll: float,
        listen: bool,
        lease: float = 60.0,
        claims: bool = True,
    ) -> None:
        """``claims``: jobs are claimed under the name of ``worker``."""
        self._database, self._dialect = database, database.dialect
        self._worker, self._queues, self._poll, self._claims = worker, queues, poll, claims
        self.session: OwnSession | None = None
        self.sleeper: Sleeper | None = None
        self._opening: Opening | None = None
        self._ears: Opening | None = None
        """A listening connection that is being made."""
        self._watch = Watch(min(LONGEST_PATIENCE, max(SHORTEST_PATIENCE, lease / 2)))
        self.news = True
        """Jobs may have been written that nobody rang for: look for them."""
        self._trouble_since: float | None = None
        self._tries = self._released = 0
        self._made_at, self._back_at, self._proof = 0.0, -NEVER, 0.0
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
        if self._opening is not None or self._ears is not None:
            return time.monotonic() + Opening.LOOK
        if self.session is None:
            return self._connect_at
        return min(self._release_at, self._listen_at if self.sleeper is None else NEVER)

    def hurry(self) -> None:
        """From any thread or a signal handler: the worker is to end, and waits no longer than it must."""
        self._watch.patience = min(self._watch.patience, HURRIED_PATIENCE)

    # -- the session -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first connection. Raises: a worker whose database is not there at its start says so and ends."""
        self._take(self._open())
        self._database.ready(self.session)
        self.worked()

    def _open(self) -> OwnSession:
        session = self._database.open_session()
        session.dedicate()
        return session

    def _take(self, session: OwnSession) -> None:
        self.session, self._made_at = session, time.monotonic()
        if self._dialect.listens:
            self._watch.add(session)

    def ready(self, known: Callable[[], list[Held]]) -> bool:
        """Whether there is a session to work on; makes it when it is time to try. ``known``: the claims that
        this worker knows of. Rows that the database thinks it holds beside them came in an answer that was lost: they
        are handed back."""
        now = time.monotonic()
        try:
            if self.session is None:
                if self._opening is None:
                    if now < self._connect_at:
                        return False
                    self._opening = Opening(self._open)
                if not self._opening.done:
                    return False
                opening, self._opening = self._opening, None
                # Before the first one nothing was claimed under this name, and on SQLite a release waits for the lock.
                first = not self._made_at
                self._take(opening.take())
                if not first and self._claims:
                    self._released = self._release(known)
                    self._release_at = now + SECOND_RELEASE
                self.news = True
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
        if self._ears is not None or (self.sleeper is None and now >= self._listen_at):
            self._listen()
        return True

    def _release(self, known: Callable[[], list[Held]]) -> int:
        assert self.session is not None
        with self._database.errors():
            return self._dialect.release_unknown(self.session, self._worker, known())

    def worked(self) -> None:
        """The database did what it was asked to: the next trouble is a new one."""
        self.answered_at = now = time.monotonic()
        if self._trouble_since is None:
            self._tries = 0
        elif now - self._made_at >= self._proof:
            self._back(now)

    def _back(self, now: float) -> None:
        since, self._trouble_since = self._trouble_since or now, None
        self._tries, self._back_at = 0, now
        events.emit(events.DatabaseBack(self._worker, now - since, self._released))

    def lost(self, error: QueueError) -> None:
        """Closes what is left and plans the next try."""
        self._close_session()
        self.stop_listening()
        now = time.monotonic()
        if self._listen_at != NEVER:
            self._listen_at = now
        gave_up, self._watch.gave_up = self._watch.gave_up, False
        if self._trouble_since is None:
            self._trouble_since = now
            self._proof = RELAPSE if now - self._back_at < RELAPSE else 0.0
            text = f"no answer for {self._watch.patience:g} s" if gave_up else str(error)
            events.emit(events.DatabaseTrouble(self._worker, f"{type(error).__name__}: {text}"))
        pause = min(RECONNECT_MOST, RECONNECT_FIRST * 2 ** min(self._tries, 10))
        self._tries += 1
        self._connect_at = now + pause * random.uniform(0.5, 1.0)

    def _close_session(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.drop()
        session, self.session = self.session, None
        if session is not None:
            self._watch.remove(session)
            with contextlib.suppress(Exception):
                session.close()

    def rest(self) -> None:
        """Nothing is held and nothing wanted for now: closed, and made again when ``ready`` asks."""
        if self.session is not None or self._opening is not None:
            self.stop_listening()
            self._close_session()
            self._made_at = self._connect_at = 0.0

    def close(self) -> None:
        if self._trouble_since is not None and self.session is not None and self.answered_at > self._made_at:
            self._back(time.monotonic())  # it was about to be believed
        self.stop_listening(for_good=True)
        self._close_session()
        self._watch.close()

    def listen_to(self, queues: tuple[str, ...]) -> None:
        """The names to be woken for are other ones now; an empty tuple: none."""
        if queues != self._queues:
            self._queues = queues
            self.stop_listening()
            self._listen_at = 0.0 if queues else NEVER

    # -- listening and sleeping --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        session = self.session
        assert session is not None
        try:
            if self._dialect.listens:
                if self._ears is None:
                    self._ears = Opening(lambda: self._database.sleeper(session, self._queues))
                if not self._ears.done:
                    return
                ears, self._ears = self._ears, None
                self.sleeper = ears.take()
            else:
                with self._database.errors():
                    self.sleeper = self._database.sleeper(session, self._queues)
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
        ears, self._ears = self._ears, None
        if ears is not None:
            ears.drop()
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

    def claim_again_at(self, now: float) -> float:
        """After a claim that looked everywhere and found nothing: when to claim again though nobody rang; ``now``: at once.
        Where upkeep's look, once a poll, tells whether anything is claimable, claims need not ask."""
        pause = self._poll if self._dialect.probes else max(self._poll, CLAIM_ANYWAY)
        return min(now + pause, self._fall_asleep(now))

    def _fall_asleep(self, now: float) -> float:
        """Announces the sleep, then looks whether every transaction that was open at the announcement has ended (see
        ``wakeup``). Returns when to look for jobs again; ``now``: at once; NEVER: whoever writes one rings."""
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
