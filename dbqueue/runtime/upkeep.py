"""What somebody has to do now and then, and every worker does in passing: make due jobs claimable, take back the jobs
of lost workers, and shorten the history. Each is one bounded statement; any number of workers may do it at once.

Due jobs are looked for at every poll, and at the instant at which the next one is due. Lost leases can wait a part of
a lease, but not longer: an idle worker asks for them once a second at most.
"""

from __future__ import annotations

import contextlib
import random
import time

from dbqueue import clock, events
from dbqueue.database.dialect import Dialect, OwnSession
from dbqueue.states import State

UPKEEP_BATCH = 500
PRUNE_BATCH, PRUNE_EVERY, PRUNE_PAUSE = 1_000, 30.0, 0.05
PRUNED = (State.SUCCEEDED, State.ACKED, State.CANCELLED, State.DISCARDED)
"""Dead and unknown jobs stay until somebody decides."""
TROUBLE_PAUSE = 0.25


class Upkeep:
    """When upkeep is due (instants of time.monotonic()), and the doing. Errors leave ``run`` after the next time was
    set, so that a database that refuses is not asked without a pause."""

    def __init__(self, dialect: Dialect, queues: tuple[str, ...], *, poll: float, lease: float, history: float) -> None:
        self._dialect, self._queues = dialect, queues
        self._poll, self._history = poll, history
        self._expire_every = min(max(poll, 1.0), lease / 4)
        self._prune_patience = min(1.0, lease / 4)
        self._at = self._expire_at = 0.0
        self._prune_at = time.monotonic() + random.uniform(0.1, 1.0) * PRUNE_EVERY

    @property
    def next_at(self) -> float:
        return min(self._at, self._prune_at)

    def watch(self, queues: tuple[str, ...]) -> None:
        """Look into these queues from now on."""
        self._queues = queues

    def soon(self, at: float = 0.0) -> None:
        """Look at ``at`` at the latest: a job is due then, or may be."""
        self._at = min(self._at, at)

    def run(self, session: OwnSession) -> bool | None:
        """Does what is due. Returns whether jobs became claimable; None: it did not look."""
        now = time.monotonic()
        found = self._due(session, now) if now >= self._at else None
        if now >= self._prune_at:
            self._prune(session, now)
        return found

    def _due(self, session: OwnSession, now: float) -> bool:
        expire = now >= self._expire_at
        self._at = now + TROUBLE_PAUSE
        due = self._dialect.upkeep(session, UPKEEP_BATCH, self._queues, expire=expire)
        if expire:
            more = due.again + due.dead + due.unknown >= UPKEEP_BATCH
            self._expire_at = now + (0.0 if more else self._expire_every)
        soonest = min((instant for instant in (due.next_run, due.next_lease) if instant is not None), default=None)
        wait = self._poll if soonest is None else max(0.0, (soonest - due.now) / clock.SECOND)
        self._at = min(now + min(wait, self._poll), self._expire_at)
        if due.again or due.dead or due.unknown:
            events.emit(events.LeasesExpired(due.again, due.dead, due.unknown))
        return bool(due.promoted or due.again or due.ready)

    def _prune(self, session: OwnSession, now: float) -> None:
        self._prune_at = now + PRUNE_EVERY * random.uniform(0.8, 1.2)
        session.begin(now + self._prune_patience)
        try:
            before = self._dialect.now(session) - round(self._history * clock.SECOND)
            rows = self._dialect.prune(session, PRUNED, before, PRUNE_BATCH)
            session.commit()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                session.rollback()
            raise
        if rows:
            events.emit(events.HistoryPruned(rows))
        if rows >= PRUNE_BATCH:
            self._prune_at = now + PRUNE_PAUSE
