"""A raw claim: a job that a program of its own works on, outside of dbqueue's worker (A8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from dbqueue import clock
from dbqueue.database.engine import Database
from dbqueue.database.tables import ClaimedRow, Fact, Held, Settlement
from dbqueue.errors import ClaimBusy, ConnectionLost, InvalidArgument, LostClaim, clean_summary, summary_of
from dbqueue.ids import as_uuid
from dbqueue.payload import CorruptPayload
from dbqueue.settings import describe
from dbqueue.states import Kind, State

BUSY_PATIENCE = 1.0
"""Seconds that a raw claim asks again while another transaction holds its row, before ClaimBusy is raised."""


class ClaimedJob:
    """One claim of one job. Every verb is fenced by the claim's token and the database's clock (D13): LostClaim means that the job
    is no longer yours and nothing changed; ClaimBusy that somebody holds its row lock just now, so ask again."""

    def __init__(self, database: Database, row: ClaimedRow, lease: int, backoff: float) -> None:
        self._database, self._row, self._lease, self._backoff = database, row, lease, backoff
        self.id: UUID = as_uuid(row.id)
        self.queue, self.target, self.key = row.queue, row.target, row.key
        self.attempt, self.max_attempts = row.attempt, row.max_attempts
        self.lease_until: datetime = clock.to_datetime(row.lease_until)

    @property
    def payload(self) -> Any:
        """The JSON value that was sent. Raises CorruptPayload without showing what is stored."""
        try:
            return msgspec.json.decode(self._row.payload)
        except msgspec.DecodeError:
            raise CorruptPayload(f"job {self.id}: the stored payload is not JSON") from None

    def ack(self) -> None:
        """The work is done: the job ends as acked. Commits before it returns. Raises LostClaim, ClaimBusy."""
        self._settle(Settlement(self._row.id, self._row.token, State.ACKED, self.queue))

    def retry(self, error: BaseException | str, delay: float | None = None) -> None:
        """The attempt failed: pending again after ``delay`` seconds (5 by default), or dead when it was the last one. Of an exception
        only the class is stored; a str is stored as it is, up to 200 characters (D10). Raises LostClaim, ClaimBusy."""
        if delay is not None and (
            isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay <= 315_360_000
        ):
            raise InvalidArgument(f"delay must be a number of seconds from 0 to 315360000; got {describe(delay)}")
        summary = clean_summary(error) if isinstance(error, str) else summary_of(error)
        last = self.attempt >= self.max_attempts
        wait = round((self._backoff if delay is None else delay) * clock.SECOND)
        self._settle(
            Settlement(
                self._row.id,
                self._row.token,
                State.DEAD if last else State.PENDING,
                self.queue,
                Kind.FAILED,
                summary,
                0 if last else wait,
            )
        )

    def bury(self, error: BaseException | str) -> None:
        """The job is dead now, whatever attempts are left; of the error as much is stored as by ``retry``. Raises LostClaim, ClaimBusy."""
        summary = clean_summary(error) if isinstance(error, str) else summary_of(error)
        self._settle(Settlement(self._row.id, self._row.token, State.DEAD, self.queue, Kind.REJECTED, summary))

    def release(self) -> None:
        """Hands the job back unstarted: pending at once, and the attempt is not counted. Raises LostClaim, ClaimBusy."""
        self._settle(Settlement(self._row.id, self._row.token, State.PENDING, self.queue, refund=True))

    def heartbeat(self) -> None:
        """Renews the lease to its full length from the database's now. Raises LostClaim, ClaimBusy."""
        database, held = self._database, [Held(self._row.id, self._row.token)]
        fact = self._ask(lambda: database.run(lambda session: database.dialect.renew(session, held, self._lease)[0]))
        if fact is not Fact.RENEWED:
            raise LostClaim(f"job {self.id}: the claim of attempt {self.attempt} was lost; stop working on it")

    def _settle(self, settlement: Settlement) -> None:
        database = self._database

        def once() -> Fact:
            return database.run(lambda session: database.dialect.settle(session, [settlement])[0])

        try:
            fact = self._ask(once)
        except ConnectionLost:  # perhaps committed: asking again answers "already"
            fact = self._ask(once)
        if fact is Fact.LOST:
            raise LostClaim(f"job {self.id}: the claim of attempt {self.attempt} was lost; its result was not recorded")

    def _ask(self, once: Callable[[], Fact]) -> Fact:
        until = time.monotonic() + BUSY_PATIENCE
        while True:
            fact = once()
            if fact is not Fact.BUSY:
                return fact
            if time.monotonic() >= until:
                raise ClaimBusy(
                    f"job {self.id}: another transaction holds its row lock; the claim is not lost, ask again"
                )
            time.sleep(0.005)

    def __repr__(self) -> str:
        return f"<ClaimedJob {self.id} of {self.queue} attempt {self.attempt}/{self.max_attempts}>"
