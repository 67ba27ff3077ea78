"""Locks: one holder of a name at a time, for as long as its time to live by the database's clock (A7).

A lock is a row with the holder's token; each verb is a compare-and-set on it. A verb never compares with a clock that it read before
a lock wait: the row is locked first, and the next statement, which cannot wait any more, reads the clock and decides. An
acquisition needs no first statement, since ON CONFLICT DO UPDATE tests its WHERE when it has the row; a plain UPDATE tests it before,
and not again if whoever it waited for rolled back.

The token is made by the client: a second ``acquire`` with the same one, after an answer that was lost, is told that it has the lock.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from dbqueue import clock, ids
from dbqueue.database import joined
from dbqueue.database.dialect import Dialect, Session
from dbqueue.database.engine import Database
from dbqueue.database.postgres import as_text
from dbqueue.errors import ConnectionLost, InvalidArgument, LockLost, LockTaken, NotSupported, QueueError
from dbqueue.settings import describe

SHORTEST, LONGEST = 0.1, 86_400.0
"""Seconds that a lock may live without being renewed."""

RESOLUTION = 0.001
"""Seconds: SQLite's clock shows milliseconds, rounded, so a lock may end so much sooner than its holder would reckon."""

TAKE = """
INSERT INTO {locks} AS held (name, token, owner, until) VALUES (:name, :token, :owner, {now} + :ttl)
ON CONFLICT (name) DO UPDATE SET token = excluded.token, owner = excluded.owner, until = {now} + :ttl
WHERE held.until <= {now} OR held.token = excluded.token
"""
SEIZE = "SELECT token FROM {locks} WHERE name = :name {for_update}"
RENEW = "UPDATE {locks} SET until = {now} + :ttl WHERE name = :name AND token = :token AND until > {now}"
GIVE_BACK = "DELETE FROM {locks} WHERE name = :name AND token = :token AND until > {now}"
SWEEP_UP = "DELETE FROM {locks} WHERE name = :name AND token = :token"
OWNER = "SELECT owner FROM {locks} WHERE name = :name AND until > {now}"


def acquire(dialect: Dialect, session: Session, name: str, token: bytes, owner: str, ttl: int) -> bool:
    """Takes the lock for ``ttl`` microseconds if nobody holds it, or prolongs it if its holder's token is this one; whether that was
    done. A transaction that holds the row is waited for."""
    session.execute(
        dialect.portable(TAKE),
        _named(dialect, name, token) | {"owner": owner, "ttl": ttl, "offset": dialect.clock.offset},
    )
    return session.changed == 1


def renew(dialect: Dialect, session: Session, name: str, token: bytes, ttl: int) -> bool:
    """Prolongs the lock to ``ttl`` microseconds from now if it still has this token and has not ended. In a transaction; until that
    ends, nobody else can take the lock over."""
    _seize(dialect, session, name)
    session.execute(
        dialect.portable(RENEW), _named(dialect, name, token) | {"ttl": ttl, "offset": dialect.clock.offset}
    )
    return session.changed == 1


def release(dialect: Dialect, session: Session, name: str, token: bytes) -> bool:
    """Ends the lock if it has this token; whether it was held until now. In a transaction."""
    _seize(dialect, session, name)
    mine = _named(dialect, name, token)
    session.execute(dialect.portable(GIVE_BACK), mine | {"offset": dialect.clock.offset})
    held = session.changed == 1
    if not held:  # the row of a lock that ended is nobody's: it need not stay
        session.execute(dialect.portable(SWEEP_UP), mine)
    return held


def owner_of(dialect: Dialect, session: Session, name: str) -> str | None:
    """Who holds it, for people; None: nobody."""
    rows = session.execute(dialect.portable(OWNER), {"name": name, "offset": dialect.clock.offset})
    return as_text(rows[0][0]) if rows else None


def _seize(dialect: Dialect, session: Session, name: str) -> None:
    session.execute(dialect.portable(SEIZE), {"name": name})


def _named(dialect: Dialect, name: str, token: bytes) -> dict[str, object]:
    return {"name": name, "token": dialect.bind_id(token)}


class Lock:
    """A named lock of the database: ``with queue.lock("import", ttl=30): ...``, or ``acquire``, ``renew`` and ``release`` by hand.

    Nothing renews it by itself: the holder does, before ``ttl`` seconds have passed by the database's clock, or somebody else may
    take it. A process that dies leaves the lock to its time to live. One holder for each object: threads make their own.
    Every verb commits by itself, and raises NotSupported inside ``using(...)``, whose open transaction would hold the row
    for longer than the lock."""

    def __init__(self, database: Database, name: str, ttl: object, owner: str | None = None) -> None:
        self._database, self.name, self._ttl = database, name, ttl_microseconds(ttl)
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        self._token: bytes | None = None
        self._until = 0.0

    @property
    def remaining(self) -> float:
        """Seconds for which it is certainly held still, told without asking the database; 0.0 when it is not held."""
        return 0.0 if self._token is None else max(0.0, self._until - time.monotonic())

    def acquire(self) -> bool:
        """Takes the lock; False: somebody has it, this object included. Does not wait for its end. Raises NotSupported; DatabaseBusy
        when a transaction holds its row for long; ConnectionLost, and then it may be held, by nobody who knows, for ``ttl`` seconds."""
        token, began = ids.new_token(), time.monotonic()
        taken, _ = self._ask(lambda d, s: acquire(d, s, self.name, token, self.owner, self._ttl))
        if taken:
            self._token, self._until = token, began + self._ttl / clock.SECOND - RESOLUTION
        return taken and self.remaining > 0

    def renew(self) -> bool:
        """Prolongs it to ``ttl`` seconds from now; False: it had ended, and may be another's. Stop what it protects."""
        token, began = self._token, time.monotonic()
        if token is None:
            return False
        renewed, _ = self._ask(lambda d, s: renew(d, s, self.name, token, self._ttl))
        if renewed:
            self._until = began + self._ttl / clock.SECOND - RESOLUTION
        else:
            self._token = None
        return renewed and self.remaining > 0

    def release(self) -> bool:
        """Gives it back; False: it had ended before, so what it protected was not protected to the end."""
        token = self._token
        if token is None:
            return False
        released, again = self._ask(lambda d, s: release(d, s, self.name, token))
        # The first try may have released it and only its answer was lost; in its time nobody else can have taken it.
        released = released or (again and self.remaining > 0)
        self._token = None
        return released

    def __enter__(self) -> Lock:
        """Raises LockTaken when somebody has it."""
        if not self.acquire():
            owner = self._database.read(lambda s: owner_of(self._database.dialect, s, self.name))
            by = "somebody who has just let it go" if owner is None else owner
            raise LockTaken(f"lock {self.name!r} is held by {by}; try again later")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raises LockLost when the block came to its end but the lock had ended before it."""
        if kind is None:
            if not self.release():
                raise LockLost(
                    f"lock {self.name!r} ended before its block did: it was not renewed within {self._ttl / clock.SECOND:g} s"
                )
            return
        with suppress(QueueError):  # the block's own error is the one to tell, and the lock ends by itself
            self.release()

    def _ask(self, verb: Callable[[Dialect, Session], bool]) -> tuple[bool, bool]:
        """The answer, and whether it took a second try: after a lost connection the first may have been done."""
        block = joined.current()
        if block is not None and not block.closed:
            raise NotSupported(
                f"lock {self.name!r} inside using(...): your open transaction would hold its row; take it outside of the block"
            )
        database = self._database
        database.ready()

        def once() -> bool:
            return database.run(lambda session: verb(database.dialect, session))

        try:
            return once(), False
        except ConnectionLost:
            return once(), True

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}, {f'{self.remaining:.1f} s left' if self.remaining else 'not held'}>"


def ttl_microseconds(ttl: object) -> int:
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not SHORTEST <= ttl <= LONGEST:
        raise InvalidArgument(f"ttl must be a number of seconds from {SHORTEST:g} to {LONGEST:g}; got {describe(ttl)}")
    return round(ttl * clock.SECOND)
