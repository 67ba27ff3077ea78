"""A claim that a worker holds, and what the outcome of its run means for the job's row: policy, without a database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dbqueue import clock
from dbqueue.database.tables import IN_PLACE, ClaimedRow, Held, Settlement
from dbqueue.events import JobEnded
from dbqueue.retry import Backoff
from dbqueue.runtime.execute import ForeignTarget, Outcome, Work
from dbqueue.settings import POLICY
from dbqueue.states import Kind, OnCrash, State
from dbqueue.targets import Target

NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Running:
    """A claim that a slot works on, or whose outcome is not settled yet. Instants are of time.monotonic()."""

    work: Work
    started_at: float
    deadline: float
    """When its timeout passes."""
    renew_at: float = 0.0
    lease_end: float = 0.0
    """When the lease has ended for certain, unless it was renewed."""
    give_up_at: float = NEVER
    """When its slot is abandoned, once the timeout has passed."""
    timed_out: bool = False
    expired: bool = False
    """Its lease must have ended while the database could not be asked. What it says counts: the claim may be ours
    after all."""
    lost: bool = False
    settlement: Settlement | None = None
    duration: float = 0.0
    report: Any = None
    """What its foreign target said about the end."""
    settle_at: float = 0.0
    """Not before this: its row was locked by somebody else a moment ago."""
    settle_pause: float = 0.0

    @property
    def row(self) -> ClaimedRow:
        return self.work.row

    @property
    def held(self) -> Held:
        return Held(self.work.row.id, self.work.row.token)

    @property
    def watch_at(self) -> float:
        """When its timeout and lease have to be looked at again."""
        if self.settlement:
            return NEVER
        return min(self.give_up_at if self.timed_out else self.deadline, NEVER if self.expired else self.lease_end)

    @property
    def look_at(self) -> float:
        """When it has to be renewed or watched; its settling is a matter apart."""
        return min(NEVER if self.lost else self.renew_at, self.watch_at)

    def prolonged(self, now: float) -> bool:
        """Whether a heartbeat has set the timeout to a later time than now."""
        self.deadline = max(self.deadline, self.work.context.beat_at + (self.row.timeout_ms or 0) / 1000)
        return self.deadline > now

    def renewed(self, sent: float, lease: int) -> None:
        """``sent`` is before the database wrote it, so our idea of the lease ends early."""
        self.renew_at, self.lease_end = sent + lease / 3e6, sent + lease / 1e6

    def ended(self, settlement: Settlement) -> JobEnded:
        """What there is to tell once the database has agreed."""
        row, again = self.row, settlement.state is State.PENDING and not settlement.refund
        return JobEnded(
            self.work.context.id, row.target, row.queue, row.attempt, settlement.state.label,
            None if settlement.kind is None else settlement.kind.value, settlement.summary, self.duration,
            settlement.delay / clock.SECOND if again else None,
        )  # fmt: skip


def obstacle(row: ClaimedRow, target: Target[object] | None, longest: float) -> Kind | None:
    """Why a job must not run (D9); it is then kept, blocked, and its attempt given back. ``longest``: microseconds
    that its timeout must stay below (D18)."""
    if target is None:
        return Kind.UNKNOWN_TARGET
    if isinstance(target, ForeignTarget):
        return None
    if row.fingerprint != target.schema.fingerprint:
        return Kind.SCHEMA_MISMATCH
    timeout = row.timeout_ms
    if not isinstance(timeout, int) or not 0 < timeout <= POLICY["timeout"].high or timeout * 1_000 >= longest:
        return Kind.INVALID_POLICY
    return None


def _decide_foreign(running: Running, target: ForeignTarget, outcome: Outcome, default: Backoff) -> Settlement | Kind:
    row, verdict = running.row, running.work.verdict
    broken = outcome.kind is Kind.CRASHED or (
        outcome.state is State.PENDING and outcome.kind is Kind.FAILED
    )  # or in its slot
    if broken and verdict is not None:  # it cannot be told either: then the row is all that says so
        return Settlement(row.id, row.token, State.DEAD, row.queue, verdict, outcome.summary)
    if broken:
        times = row.lapses + 1  # what was put back as no failure costs attempts too, and is no crash
        wait = (target.policy.retry or default).delay_us(times)
        return (
            Kind.CRASHED
            if times >= target.crashes
            else failed(row, target, default, Kind.CRASHED, outcome.summary, wait)
        )
    delay = IN_PLACE if outcome.delay is None and outcome.state is State.PENDING else outcome.delay or 0
    return Settlement(row.id, row.token, outcome.state, row.queue, outcome.kind, outcome.summary, delay)


def blocked(row: ClaimedRow, kind: Kind, summary: str | None = None) -> Settlement:
    return Settlement(row.id, row.token, State.BLOCKED, row.queue, kind, summary, refund=True)


def outdated(row: ClaimedRow, lease: int) -> Settlement | None:
    """The end of a job that expired before it was claimed; ``lease`` (microseconds) is what the claim asked for, so that the time of
    the claim is known by the database's clock. A run that has begun may end when it will."""
    if row.expires_at is None or row.expires_at > row.lease_until - lease:
        return None
    return Settlement(row.id, row.token, State.CANCELLED, row.queue, Kind.EXPIRED)


def released(row: ClaimedRow) -> Settlement:
    return Settlement(row.id, row.token, State.PENDING, row.queue, Kind.RELEASED, refund=True)


def failed(
    row: ClaimedRow,
    target: Target[object] | None,
    default: Backoff,
    kind: Kind,
    summary: str | None = None,
    delay: int | None = None,
) -> Settlement:
    """Pending again after ``delay`` microseconds (None: as the target says), or dead with the last attempt."""
    one_try = target is not None and target.policy.one_try and kind is Kind.TIMEOUT
    if one_try or row.attempt >= row.max_attempts:
        return Settlement(row.id, row.token, State.DEAD, row.queue, kind, summary)
    policy = (target.policy.retry if target else None) or default
    wait = policy.delay_us(row.attempt) if delay is None else delay
    return Settlement(row.id, row.token, State.PENDING, row.queue, kind, summary, wait)


def crashed(row: ClaimedRow, target: Target[object] | None, default: Backoff, summary: str | None) -> Settlement:
    """Its process died under it: what the sweep would do with a lease that ended, at once and with the target's
    backoff."""
    if row.on_crash == OnCrash.RETRY:
        return failed(row, target, default, Kind.CRASHED, summary)
    state = State.UNKNOWN if row.on_crash == OnCrash.UNKNOWN else State.DEAD
    return Settlement(row.id, row.token, state, row.queue, Kind.CRASHED, summary)


def decide(running: Running, outcome: Outcome, default: Backoff, *, stopping: bool) -> Settlement | Kind:
    """``stopping``: the cancel flags were set because the worker must end. A Kind: the job is over, and its target has to tell so."""
    row, target, state = running.row, running.work.target, outcome.state
    if outcome.kind is Kind.RELEASED:
        return released(row)  # its child died before it had begun
    if isinstance(target, ForeignTarget):
        return _decide_foreign(running, target, outcome, default)
    if outcome.kind is Kind.CRASHED and not running.timed_out:
        return crashed(row, target, default, outcome.summary)
    if state is State.BLOCKED:
        return blocked(row, outcome.kind or Kind.CORRUPT_PAYLOAD, outcome.summary)
    if running.timed_out and state in (State.SUCCEEDED, State.PENDING):
        # Whatever it returned: a limit that holds only for some jobs is none, and process slots kill at it.
        return failed(row, target, default, Kind.TIMEOUT)
    if (stopping or running.expired) and running.work.context.noticed and state in (State.SUCCEEDED, State.PENDING):
        return released(row)  # it stopped half-way because we asked it to
    if state is State.PENDING and outcome.payload is not None:
        kind, delay = outcome.kind, outcome.delay or 0
        return Settlement(row.id, row.token, state, row.queue, kind, outcome.summary, delay, payload=outcome.payload)
    if state is State.PENDING:
        return failed(row, target, default, outcome.kind or Kind.FAILED, outcome.summary, outcome.delay)
    if state is State.SUCCEEDED and target is not None:
        state = target.done
    return Settlement(row.id, row.token, state, row.queue, outcome.kind, outcome.summary)
