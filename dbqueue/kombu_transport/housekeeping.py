"""What some process has to do for all: keep its consumers' rows alive, and clear away what nobody uses any more.

Each is a short transaction, and any number of processes may do it at once.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import TypeVar

from dbqueue import routing
from dbqueue.database.dialect import OwnSession, Session
from dbqueue.database.engine import Database
from dbqueue.kombu_transport import message as messages
from dbqueue.mail import Mail

T = TypeVar("T")

ALIVE, ALIVE_EVERY = 60.0, 20.0
"""Seconds that a consumer's row is good for, and how often its process moves them on."""
SWEEP_EVERY = 30.0
PATIENCE = 0.5
EXPIRED_BATCH, EXPIRED_BATCHES = 100, 20
TOLD_FOR = 3_600.0
"""Seconds for which a task that Celery's own ``expires`` ended stays, for a worker that comes to tell it as revoked."""


class Housekeeping:
    """Instants are of time.monotonic()."""

    def __init__(self, database: Database, mail: Mail, worker: str) -> None:
        self._dialect, self._mail, self._worker = database.dialect, mail, worker
        self._alive_at = time.monotonic() + ALIVE_EVERY
        self._expired_after = self._batches = 0
        self._sweep_at = time.monotonic() + random.uniform(0.5, 1.0) * SWEEP_EVERY

    @property
    def next_at(self) -> float:
        return min(self._alive_at, self._sweep_at)

    def run(self, session: OwnSession, now: float) -> None:
        """Does what is due. Errors leave it after the next time was set."""
        if now >= self._alive_at:
            self._alive_at = now + ALIVE_EVERY
            _write(session, lambda s: routing.keep_consumers(self._dialect, s, self._worker, round(ALIVE * 1e6)))
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_EVERY * random.uniform(0.8, 1.2)
            self._sweep(session)

    def _sweep(self, session: OwnSession) -> None:
        dialect, grace = self._dialect, round(ALIVE * 1e6)
        for queue in routing.abandoned_queues(dialect, session, grace):
            route = routing.find_queue(dialect, session, queue)
            routing.delete_in_steps(dialect, lambda verb: _write(session, verb), queue, route)
            self._mail.drop(queue, session)
        self._clear_expired(session)
        _write(session, lambda s: routing.forget_dead_consumers(dialect, s, grace))
        _write(session, lambda s: routing.forget_revoked(dialect, s))
        self._mail.prune(session)

    def _clear_expired(self, session: OwnSession) -> None:
        """A batch, and at once the next, up to a number of them; the following round goes on from there."""
        seen = routing.expired_messages(self._dialect, session, self._expired_after, EXPIRED_BATCH)
        for message in seen:
            if message.since >= TOLD_FOR * 1e6 or not messages.has_expiry(message.head):
                _write(session, lambda s, id=message.id: self._dialect.cancel(s, id))  # type: ignore[misc]
        whole = len(seen) < EXPIRED_BATCH
        self._batches = (self._batches + 1) % EXPIRED_BATCHES
        if not whole and self._batches:
            self._sweep_at = 0.0
        # Those that stay must not be in the way of others. As many at one microsecond would be passed over until the next round.
        self._expired_after = 0 if whole else max(seen[-1].at, self._expired_after + 1)


def _write(session: OwnSession, verb: Callable[[Session], T]) -> T:
    session.begin(time.monotonic() + PATIENCE)
    try:
        answer = verb(session)
        session.commit()
        return answer
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            session.rollback()
        raise
