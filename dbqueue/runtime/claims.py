"""The claims that a worker holds: from the claim until the database has agreed to its end, or says that somebody else
has it.

No statement is sent here. The loop asks what to settle and to renew, and tells what the database answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from dbqueue import events
from dbqueue.database.tables import ClaimedRow, Fact, Held, Settlement
from dbqueue.retry import Backoff
from dbqueue.runtime.context import JobContext
from dbqueue.runtime.execute import ForeignTarget, Outcome, Work
from dbqueue.runtime.running import NEVER, Running, decide, failed, released
from dbqueue.runtime.slots import Slots
from dbqueue.states import Kind, State
from dbqueue.targets import Target

TIMEOUT_GRACE = 2.0
"""Seconds at most that a job gets between its cancel flag and the settling of its timeout."""
LONG = 0.01
"""Seconds of a job that is long, however long: a few short ones after it show that it was not a usual one."""
BUSY_FIRST, BUSY_MOST = 0.002, 0.1
"""Seconds until a settle that answered busy is asked again."""


class Claims:
    """``lease`` is in microseconds, instants are of time.monotonic()."""

    def __init__(self, slots: Slots, lease: int, backoff: Backoff) -> None:
        self._slots, self._lease, self._backoff = slots, lease, backoff
        # By the work and not by the job: a worker that lost a claim may claim the job again while the first handler still runs.
        self._running: dict[Work, Running] = {}
        self._unsettled: dict[Work, Running] = {}
        self._look_at = NEVER
        """Before this, no timeout passes, no lease ends and no renewal is due: most turns need not look at every claim."""
        self._given_up: list[Held] = []
        self._to_bury: deque[Running] = deque()
        self.done = self.released = 0
        self.usual = LONG
        """Seconds that a job runs, as they were of late."""
        self.on_blocked: Callable[[ClaimedRow, Settlement], None] | None = None
        """Is told, in the loop, of each row that is kept because it cannot run."""
        self.next_retry = NEVER
        """When the soonest retry settled since the last look is due: our own commit wakes nobody."""

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, running: Running) -> bool:
        return running.work in self._running

    def known(self) -> list[Held]:
        """Claims whose rows may rightly say that this worker has them."""
        return [*(running.held for running in self._running.values()), *self._given_up]

    def next_at(self, *, connected: bool) -> float:
        """When something is to be done about one of them; without a connection only timeouts are watched."""
        if not connected:
            return min((running.watch_at for running in self._running.values()), default=NEVER)
        if time.monotonic() >= self._look_at:
            self._look_at = min((running.look_at for running in self._running.values()), default=NEVER)
        return min([self._look_at, *[running.settle_at for running in self._unsettled.values()]])

    def to_settle(self, now: float) -> list[Running]:
        return [running for running in self._unsettled.values() if running.settle_at <= now]

    def others_end_soon(self, now: float, within: float) -> bool:
        """Whether no more than half of the claims have ended, and one that a slot works on should end ``within`` seconds, if it is a
        usual one."""
        if self.usual > within or 2 * len(self._unsettled) > len(self._running):
            return False
        since = now - 2 * within
        return any(r.started_at > since and r.settlement is None for r in self._running.values())

    def to_renew(self, now: float) -> list[Running]:
        if now < self._look_at:
            return []
        return [running for running in self._running.values() if running.renew_at <= now and not running.lost]

    def add(self, row: ClaimedRow, target: Target[object] | None, sent: float) -> Running:
        """``sent`` is before the database wrote the lease, so our idea of it ends early; the timeout counts from
        now."""
        work = Work(row, target, JobContext(row.id, row.target, row.attempt, row.max_attempts))
        now, timeout = time.monotonic(), row.timeout_ms
        deadline = now + timeout / 1000 if isinstance(timeout, int) else NEVER
        if isinstance(target, ForeignTarget):
            limit = target.timeout(row)
            deadline = NEVER if limit is None else now + limit
        self._running[work] = running = Running(work, now, deadline)
        running.renewed(sent, self._lease)
        self._look_at = min(self._look_at, running.renew_at, deadline)
        return running

    def at_work(self) -> list[Running]:
        """Those that a slot works on. From any thread: it is a copy."""
        held = list(self._running.values())
        return [r for r in held if r.settlement is None and r.work.verdict is None and not r.lost]

    def terminate(self, work: Work, number: int) -> None:
        """Kills what runs; its target then tells that it was revoked, by the signal of this number. Only where slots kill."""
        running = self._running.get(work)
        if running is not None and running.settlement is None and work.verdict is None and not running.lost:
            self._slots.abandon(work)
            self._bury(running, Kind.REVOKED, number)

    def end(self, running: Running, settlement: Settlement, duration: float = 0.0) -> None:
        """Notes the outcome; it is written with the next turn, and the claim is renewed until then."""
        running.settlement, running.duration = settlement, duration
        self._unsettled[running.work] = running

    # -- what handlers did -------------------------------------------------------------------------------------------

    def collect(self, *, stopping: bool) -> None:
        """Takes the outcomes of slots that ended. ``stopping``: the flags were set because the worker must end."""
        for outcome in self._slots.collect():
            running = self._running.get(outcome.work)
            if running is None or running.settlement is not None:
                continue
            self.usual = min(self.usual + (outcome.duration - self.usual) / 4, LONG)
            running.report = outcome.report
            if outcome.settled is not None:
                self._settled_by_itself(running, outcome)
            elif running.lost:
                self._forget_lost(running)
            else:
                ending = decide(running, outcome, self._backoff, stopping=stopping)
                if isinstance(ending, Settlement):
                    self.end(running, ending, outcome.duration)
                else:
                    self._bury(running, ending)

    def _settled_by_itself(self, running: Running, outcome: Outcome) -> None:
        row = running.row
        if outcome.settled is Fact.LOST:
            self._forget_lost(running)
            return
        self._forget(running)
        self.done += 1
        running.duration = outcome.duration
        self._tell_target(running)
        if events.wanted(events.JobEnded):
            events.emit(
                running.ended(Settlement(row.id, row.token, outcome.state, row.queue, outcome.kind, outcome.summary))
            )

    @staticmethod
    def _tell_target(running: Running) -> None:
        target = running.work.target
        if isinstance(target, ForeignTarget):
            target.ended(running.work, running.report)

    def _bury(self, running: Running, verdict: Kind, number: int | None = None) -> None:
        """Its target has to tell how it ended, in a slot: it is held and renewed until then."""
        work = running.work
        self._running.pop(work, None)
        told = Work(
            work.row, work.target, JobContext(work.row.id, work.row.target, work.row.attempt, work.row.max_attempts)
        )
        told.verdict, told.signal = verdict, number
        self._running[told] = running
        running.work, running.deadline, running.timed_out = told, NEVER, False
        self._look_at = min(self._look_at, running.renew_at)
        self._to_bury.append(running)

    def to_bury(self) -> Running | None:
        """The next one whose target has to be asked; it is started by the caller, who has an idle slot."""
        return self._to_bury.popleft() if self._to_bury else None

    def watch(self) -> bool:
        """At its timeout a job's flag is set; after a grace it is settled without its thread, and the slot abandoned.
        The flag is set, too, when the claim cannot have been renewed in time: somebody else may run the job by now.
        Returns whether half of the slots are abandoned."""
        now, abandoned = time.monotonic(), False
        if now < self._look_at:
            return False
        for running in list(self._running.values()):
            if running.settlement is not None:
                continue
            if not running.timed_out and now >= running.deadline and not running.prolonged(now):
                self._flag(running, now)
            elif not running.expired and now >= running.lease_end:
                running.expired = True
                running.work.context.cancel()
            elif running.timed_out and now >= running.give_up_at:
                self._slots.abandon(running.work)
                if not self._slots.kills:
                    abandoned = True
                    job, target = running.work.context.id, running.row.target
                    events.emit(events.SlotAbandoned(job, target, self._slots.abandoned, self._limit))
                self._end_without_handler(running, now)
        return abandoned and self._slots.abandoned >= self._limit

    @property
    def _limit(self) -> int:
        return max(1, self._slots.size // 2)

    def _flag(self, running: Running, now: float) -> None:
        running.timed_out = True
        running.give_up_at = now if self._slots.kills else now + min(TIMEOUT_GRACE, self._lease / 4e6)
        running.work.context.cancel()
        row = running.row
        limit = running.deadline - running.started_at
        events.emit(events.JobTimedOut(running.work.context.id, row.target, row.attempt, round(limit, 3)))

    def _end_without_handler(self, running: Running, now: float) -> None:
        if running.lost:
            self._forget_lost(running)
            return
        row, target = running.row, running.work.target
        if running.timed_out and isinstance(target, ForeignTarget):
            self._bury(running, Kind.TIMEOUT)
            return
        settlement = failed(row, target, self._backoff, Kind.TIMEOUT) if running.timed_out else released(row)
        self.end(running, settlement, now - running.started_at)

    # -- what the database answered ----------------------------------------------------------------------------------

    def settled(self, settling: Sequence[Running], facts: Sequence[Fact]) -> None:
        now, told = time.monotonic(), events.wanted(events.JobEnded)
        for running, fact in zip(settling, facts, strict=True):
            if fact is Fact.BUSY:  # a claimant's short transaction, as a rule; or an operator's long one
                running.settle_pause = min(max(BUSY_FIRST, running.settle_pause * 2), BUSY_MOST)
                running.settle_at = now + running.settle_pause
                continue
            settlement = running.settlement
            if fact is Fact.LOST or settlement is None:
                self._forget_lost(running)
                continue
            self._forget(running)
            self.done += 1
            self.released += settlement.kind is Kind.RELEASED
            self._tell_target(running)
            if settlement.state is State.BLOCKED and self.on_blocked is not None:
                self.on_blocked(running.row, settlement)
            if settlement.state is State.PENDING and settlement.delay:
                self.next_retry = min(self.next_retry, now + settlement.delay / 1e6)
            if told:
                events.emit(running.ended(settlement))

    def renewed(self, renewing: Sequence[Running], facts: Sequence[Fact], sent: float) -> None:
        for running, fact in zip(renewing, facts, strict=True):
            if running not in self:
                continue  # settled in this very turn
            if fact is Fact.RENEWED:
                running.renewed(sent, self._lease)
            elif fact is Fact.BUSY:
                running.renew_at = sent + min(0.05, self._lease / 2e7)
            else:
                self._lose(running)

    def refused(self, running: Running) -> None:
        """The database will not write this outcome: once more without its summary, then its lease decides."""
        if running.settlement is not None and running.settlement.summary is not None:
            running.settlement = replace(running.settlement, summary=None)
        else:
            self._given_up.append(running.held)
            self._lose(running)

    def not_renewed(self, running: Running, now: float) -> None:
        """Refused, too: again in a moment."""
        running.renew_at = now + self._lease / 1e7

    def _lose(self, running: Running) -> None:
        """Ours no more: tell the handler, and drop what it returns."""
        running.lost = True
        running.work.context.cancel()
        if running.settlement is not None:
            self._forget_lost(running)

    def _forget_lost(self, running: Running) -> None:
        self._forget(running)
        events.emit(events.ClaimLost(running.work.context.id, running.row.target, running.row.attempt))

    def _forget(self, running: Running) -> None:
        self._running.pop(running.work, None)
        self._unsettled.pop(running.work, None)

    # -- the end -----------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        for running in self._running.values():
            running.work.context.cancel()

    def hand_back(self) -> None:
        """What still runs is settled without its handler: released, or failed where its timeout had passed."""
        now = time.monotonic()
        for running in list(self._running.values()):
            if running.settlement is None:
                self._slots.abandon(running.work)
                if (
                    running.work.verdict is None
                ):  # else it is over: handed back, it would be run again; its lease decides
                    self._end_without_handler(running, now)

    def leave(self) -> int:
        """What could not be settled stays with its lease. Returns how many."""
        left = len(self._running)
        self._running.clear()
        self._unsettled.clear()
        return left
