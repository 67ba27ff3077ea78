"""One leader fires the schedules (A3). ``dbqueue beat`` needs none: a slot has one job however many beats there are."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from dbqueue import ids, locks
from dbqueue.database.dialect import Dialect, OwnSession
from dbqueue.database.engine import Database
from dbqueue.errors import LeadershipLost, QueueError
from dbqueue.queue import DBQueue
from dbqueue.runtime.beat import POLL, Beat, Stored
from dbqueue.settings import RESERVED_PREFIX

LEADER = f"{RESERVED_PREFIX}schedules"
LEADERSHIP = 30.0
"""Seconds that leadership lasts without being renewed."""


class Led(Stored):
    """Fires what is due while its lock is held, which is asked and prolonged in the transaction that fires."""

    def __init__(self, database: Database, name: str, ttl: int) -> None:
        self._database, self.name, self._ttl = database, name, ttl
        self._token = ids.new_token()

    def acquire(self) -> bool:
        dialect = self._database.dialect
        return self._database.run(lambda s: locks.acquire(dialect, s, LEADER, self._token, self.name, self._ttl))

    def renew(self) -> None:
        self._database.run(lambda session: self.begin(self._database.dialect, session))

    def release(self) -> None:
        with suppress(QueueError):  # it ends by itself
            self._database.run(lambda s: locks.release(self._database.dialect, s, LEADER, self._token))

    def begin(self, dialect: Dialect, session: OwnSession) -> bool:
        if not locks.renew(dialect, session, LEADER, self._token, self._ttl):
            raise LeadershipLost(
                f"{self.name} leads the schedules no more: its lock ended before it was renewed, and another runner may have it. "
                "Nothing was fired after that: start again, or leave the work to the other"
            )
        return True


def run_schedules(queue: DBQueue, stop: threading.Event, *, ttl: float = LEADERSHIP, poll: float = POLL) -> None:
    """Fires schedules as the only one of those who run this, until ``stop`` is set; blocks.

    Waits until nobody holds the leadership, then renews it before each look and in each transaction that fires. Raises
    LeadershipLost, having fired nothing more, when it had ended: ``ttl`` seconds passed without a renewal. Gives it back at the
    end; a process that dies leaves it to its time. Raises ScheduleConflict and, at the start, what the database says (A3, A4)."""
    database = queue.database
    led = Led(database, ids.worker_id(socket.gethostname()), locks.ttl_microseconds(ttl))
    queue.start_schedules()
    while not led.acquire():
        if stop.wait(poll):
            return
    beat = Beat(database, stored=led, name=led.name, poll=min(poll, ttl / 3))
    try:
        beat.start()
        while not stop.is_set():
            led.renew()
            stop.wait(beat.step())
    finally:
        beat.close()
        led.release()
