"""The worker: one loop thread, one connection, one transaction a turn; jobs run in slots.

Terms. A *claim* is a job that is ours until its lease ends by the database's clock. A *turn* is one round trip: settle everything
that finished since the last one, renew what is due, claim for the slots that are idle now, commit. No user code runs inside it.
While a turn is under way more slots finish, so batches form by themselves as load grows, and a lone job is settled at once.

What can fail, and what then happens:
* The process dies: its leases end, the sweep of any other worker makes the jobs claimable again; each cost an attempt (D12).
* The connection is lost: running jobs go on; after the reconnect, outcomes are settled again (a COMMIT whose answer was lost says
  "already"), and rows claimed in a transaction whose answer never came are handed back, told apart by this worker's id.
* A settle answers busy: somebody holds the row's lock just now; it is asked again next turn. Routine, neither logged nor counted.
* A settle or renewal answers lost: the job belongs to somebody else; its flag is set and its outcome dropped (D13).
* One statement of the turn is refused: the turn is rolled back, and the outcomes are settled one by one, so that a single bad row
  cannot stop the others.

Only this loop settles jobs. Instants in here are of time.monotonic(); every comparison with a lease is made by the database.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dbqueue import clock, events, ids, settings
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import ClaimedRow, ClaimRequest, Fact, Held, Settlement, Turn, TurnResult
from dbqueue.database.wakeup import Sleeper
from dbqueue.errors import ConfigError, ConnectionLost, DatabaseBusy, QueueError
from dbqueue.queue import DBQueue
from dbqueue.retry import Backoff
from dbqueue.runtime.context import JobContext
from dbqueue.runtime.log import log_events
from dbqueue.runtime.shutdown import stop_on_signals
from dbqueue.runtime.slots import Outcome, ThreadSlots, Work
from dbqueue.runtime.wake import Wake
from dbqueue.states import Kind, State

EXIT_CLEAN = 0
EXIT_ABANDONED = 75
"""EX_TEMPFAIL: half of the slots hold jobs that ignore their timeout; a supervisor is to start a fresh process."""

UPKEEP_BATCH = 500
PRUNE_BATCH, PRUNE_EVERY, PRUNE_PAUSE = 1_000, 30.0, 0.05
SHORTEST_HISTORY = 60.0
"""Seconds that even a switched-off history keeps succeeded jobs: a settle whose COMMIT answer was lost must be told "already"."""
TIMEOUT_GRACE = 2.0
"""Seconds at most that a job gets between its cancel flag and the settling of its timeout."""
RECONNECT_FIRST, RECONNECT_MOST = 0.1, 5.0
PRUNED = (State.SUCCEEDED, State.ACKED, State.CANCELLED, State.DISCARDED)
"""Dead and unknown jobs stay until somebody decides."""


@dataclass(frozen=True)
class WorkerOptions:
    """What one worker may be told; None: the queue's settings. Seconds."""

    queues: tuple[str, ...] | None = None
    slots: int | None = None
    lease: float | None = None
    name: str | None = None
    once: bool = False
    """Ends when nothing is due any more."""
    max_jobs: int | None = None
    """Ends after this many jobs were claimed and settled."""
    shutdown: float = 30.0
    """How long running jobs may take to end after a stop was asked for."""


@dataclass(eq=False)
class Running:
    """A claim that a slot works on, or whose outcome is not settled yet."""

    work: Work
    renew_at: float
    deadline: float
    claimed_at: float
    timed_out: bool = False
    lost: bool = False
    settlement: Settlement | None = None
    ended: events.JobEnded | None = None
    give_up_at: float = field(default=float("inf"))

    @property
    def row(self) -> ClaimedRow:
        return self.work.row


class Worker:
    """``run`` is the loop; ``step`` is one turn of it and returns the seconds until the next."""

    def __init__(self, queue: DBQueue, options: WorkerOptions | None = None) -> None:
        self.queue, self.options = queue, options or WorkerOptions()
        self.database: Database = queue.database
        self.dialect = self.database.dialect
        self.targets = queue.targets
        job_settings = queue.settings
        self.queues = self._queue_names()
        size = job_settings.workers if self.options.slots is None else self.options.slots
        if not 1 <= size <= 1_000:
            raise ConfigError(f"a worker has 1 to 1000 slots (-c); got {size}")
        self.lease = self._lease_us(job_settings)
        self.poll = job_settings.poll_ms / 1000
        self.history = max(job_settings.history_ms / 1000, SHORTEST_HISTORY)
        self.backoff = Backoff(job_settings.retry_base_ms / 1000, job_settings.retry_max_ms / 1000)
        self.database.grow_pool(
            size + 1
        )  # D18: handlers share the pool; the loop's own connections stand outside of it
        self.name = self.options.name or ids.worker_id(socket.gethostname())
        self.wake = Wake()
        self.slots = ThreadSlots(size, self.wake.ring)
        self.running: dict[bytes, Running] = {}
        self.unsettled: list[Running] = []
        self.session: OwnSession | None = None
        self.sleeper: Sleeper | None = None
        self.stopping: str | None = None
        self.exit_code = EXIT_CLEAN
        self.claimed = self.done = self.released = 0
        self._hurried = self._flagged = self._told = False
        self._stop_until = float("inf")
        self._backlog = True
        self._claim_at = self._upkeep_at = self._look_at = 0.0
        self._look_pause = 0.002
        self._turn_after = 0.0
        self._prune_at = time.monotonic() + random.uniform(0.1, 1.0) * PRUNE_EVERY
        self._lost_at: float | None = None
        self._reconnects = 0
        self._turn_trouble = False

    def _queue_names(self) -> tuple[str, ...]:
        given = self.options.queues
        names = given if given else tuple(sorted({t.policy.queue for t in self.targets.values()})) or ("default",)
        return tuple(dict.fromkeys(settings.check_name("queue", name, allow_reserved=True) for name in names))

    def _lease_us(self, job_settings: settings.JobSettings) -> int:
        lease_ms = job_settings.lease_ms
        if self.options.lease is not None:
            lease_ms = settings.JobSettings.from_options(lease=self.options.lease).lease_ms
        settings.check_lease_rule(
            self.dialect.name,  # type: ignore[arg-type]
            lease_ms,
            {name: target.policy.timeout_ms for name, target in self.targets.items()},
        )
        return lease_ms * 1_000

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Works until it was asked to stop and has nothing left in its hands; returns the exit code."""
        self.database.ready()
        events.emit(
            events.WorkerStarted(
                self.name, self.database.label, self.queues, self.slots.size, self.lease / 1e6, len(self.targets)
            )
        )
        try:
            while True:
                pause = self.step()
                if self.finished:
                    break
                self._wait(pause)
        finally:
            self._close()
        events.emit(events.WorkerStopped(self.name, self.done, self.released, len(self.running), self.exit_code))
        return self.exit_code

    @property
    def finished(self) -> bool:
        return self.stopping is not None and not self.running

    def stop(self, reason: str = "asked to stop") -> None:
        """From any thread or a signal handler. First call: claim nothing more and let running jobs end within ``shutdown`` seconds.
        Second call: cancel them, hand them back and end."""
        if self.stopping is None:
            self._stop_until = time.monotonic() + self.options.shutdown
            self.stopping = reason
        else:
            self._hurried = True
        self.wake.ring()

    def step(self) -> float:
        """Everything that is due now; returns the seconds until something else is."""
        self._collect()
        self._watch_timeouts()
        if self.stopping is not None:
            self._shut_down()
        if not self._connected():
            return max(0.0, self._turn_after - time.monotonic())
        try:
            with self.database.errors():
                again = self._turn()
                self._maintain()
            self._end_if_done()
            return 0.0 if again else self._pause()
        except ConnectionLost as error:
            self._connection_lost(error)
        except DatabaseBusy:
            self._turn_after = time.monotonic() + random.uniform(0.002, 0.02)
        except QueueError as error:
            self._refused(error)
        return max(0.0, self._turn_after - time.monotonic())

    def _end_if_done(self) -> None:
        if self.stopping is None and not self.running:
            if self.options.max_jobs is not None and self.claimed >= self.options.max_jobs:
                self.stop("all the jobs that were asked for are done")
            elif self.options.once and not self._backlog:
                self.stop("nothing is due")

    def _wait(self, seconds: float) -> None:
        try:
            if self.wake.wait(seconds, self.sleeper):
                self._claim_at = self._upkeep_at = 0.0
                self._backlog = True
        except Exception as error:
            if self.dialect.classify(error) is None:
                raise
            self._drop_sleeper()

    def _pause(self) -> float:
        now = time.monotonic()
        times = [self._upkeep_at, self._prune_at]
        if self.unsettled:
            times.append(now)
        for running in self.running.values():
            if not running.lost:
                times.append(running.renew_at)
            if running.settlement is None:
                times.append(running.give_up_at if running.timed_out else running.deadline)
        if self.stopping is not None:
            times.append(self._stop_until)
        elif self.slots.idle:
            times.append(self._claim_at)
        return max(0.0, max(min(times), self._turn_after) - now)

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Settle, renew, claim. Returns whether the next turn should follow at once."""
        now = time.monotonic()
        if now < self._turn_after:
            return False
        assert self.session is not None
        settling = self.unsettled
        renewing = [r for r in self.running.values() if r.renew_at <= now and not r.lost]
        claim = self._claim_request(now)
        if not settling and not renewing and claim is None:
            return False
        turn = Turn(
            [r.settlement for r in settling if r.settlement is not None],
            [Held(r.row.id, r.row.token) for r in renewing],
            self.lease,
            claim,
        )
        result = self.dialect.turn(self.session, turn)
        self._turn_trouble = False
        self.unsettled = []
        self._settled(settling, result.settled)
        self._renewed(renewing, result.renewed, now)
        return claim is not None and self._started(claim, result, now)

    def _claim_request(self, now: float) -> ClaimRequest | None:
        idle = self.slots.idle
        if self.options.max_jobs is not None:
            idle = min(idle, self.options.max_jobs - self.claimed)
        if self.stopping is not None or idle <= 0:
            return None
        if not (self._backlog or now >= self._claim_at or self.unsettled):
            return None
        if self.dialect.probes and not self.unsettled and self.session is not None:
            if not self.dialect.probe(self.session, self.queues):
                self._nothing_found(now)
                return None
        # Equal priorities of several queues take turns: each claim begins with another queue.
        turn = self.claimed % len(self.queues)
        return ClaimRequest(self.queues[turn:] + self.queues[:turn], idle, self.name, ids.new_token(), self.lease)

    def _nothing_found(self, now: float) -> None:
        self._backlog = False
        self._claim_at = now + self.poll
        if self.options.once:
            self._upkeep_at = 0.0  # the last look must see that nothing has become due either

    def _started(self, claim: ClaimRequest, result: TurnResult, sent: float) -> bool:
        """Hands what was claimed to the slots. ``sent`` is before the database wrote the lease, so our idea of it ends early."""
        rows = result.claimed
        self.claimed += len(rows)
        full = len(rows) >= 1 << (claim.limit.bit_length() - 1)
        if rows and full:
            self._backlog = True
        else:
            self._nothing_found(sent)
        for row in rows:
            self._start(row, sent)
        if self.sleeper is not None:
            if not self.slots.idle:
                self._sleeper_call(self.sleeper.wake)
            elif not self._backlog:
                self._fall_asleep(sent)
        return bool(self.unsettled or (self._backlog and self.slots.idle))

    def _start(self, row: ClaimedRow, sent: float) -> None:
        target = self.targets.get(row.target)
        timeout = (row.timeout_ms or 0) / 1000
        context = JobContext(ids.as_uuid(row.id), row.target, row.attempt, row.max_attempts)
        work = Work(row, target, context)  # type: ignore[arg-type]
        running = self.running[row.id] = Running(work, sent + self.lease / 3e6, sent + timeout, sent)
        kind = self._obstacle(row)
        if kind is not None:
            self._settle(running, Settlement(row.id, row.token, State.BLOCKED, row.queue, kind, refund=True), 0.0)
            return
        events.emit(events.JobStarted(context.id, row.target, row.queue, row.attempt))
        self.slots.start(work)

    def _obstacle(self, row: ClaimedRow) -> Kind | None:
        """Why this row must not run (D9): it is kept, blocked, and its attempt given back."""
        target = self.targets.get(row.target)
        if target is None:
            return Kind.UNKNOWN_TARGET
        if row.fingerprint != target.schema.fingerprint:
            return Kind.SCHEMA_MISMATCH
        if row.timeout_ms is None or not 0 < row.timeout_ms <= 3_600_000:
            return Kind.INVALID_POLICY
        if self.dialect.name == "sqlite" and row.timeout_ms * 1_000 >= self.lease:
            return Kind.INVALID_POLICY
        return None

    def _fall_asleep(self, now: float) -> None:
        """No work: announce it, and look again until every transaction that was open then has ended (see wakeup)."""
        sleeper = self.sleeper
        if sleeper is None:
            return
        if not sleeper.announced:
            self._sleeper_call(sleeper.announce)
            self._look_pause = 0.002
            self._claim_at = self._look_at = now
        elif not sleeper.settled and now >= self._look_at:
            self._sleeper_call(sleeper.look)
            self._look_at = now + self._look_pause
            self._look_pause = min(self._look_pause * 2, self.poll)
            self._claim_at = now if sleeper.settled else min(self._claim_at, self._look_at)

    def _sleeper_call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if self.dialect.classify(error) is None:
                raise
            self._drop_sleeper()

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        for outcome in self.slots.collect():
            running = self.running.get(outcome.work.row.id)
            if running is None or running.work is not outcome.work or running.settlement is not None:
                continue
            if running.lost:
                self._forget_lost(running)
            else:
                self._settle(running, self._decide(running, outcome), outcome.duration)

    def _decide(self, running: Running, outcome: Outcome) -> Settlement:
        """Policy: what an outcome means for the job's row."""
        row, state, kind, summary, delay = running.row, outcome.state, outcome.kind, outcome.summary, outcome.delay
        if running.timed_out and state in (State.SUCCEEDED, State.PENDING):
            # Whatever it returned: a limit that holds only for some jobs is none, and process slots kill at it.
            return self._failed(row, Kind.TIMEOUT, None, None)
        if self._flagged and running.work.context.noticed and state in (State.SUCCEEDED, State.PENDING):
            return self._release(running)  # it stopped half-way because we asked it to
        if state is State.PENDING:
            return self._failed(row, kind or Kind.FAILED, summary, delay)
        return Settlement(row.id, row.token, state, row.queue, kind, summary, refund=state is State.BLOCKED)

    def _failed(self, row: ClaimedRow, kind: Kind, summary: str | None, delay: int | None) -> Settlement:
        if row.attempt >= row.max_attempts:
            return Settlement(row.id, row.token, State.DEAD, row.queue, kind, summary)
        target = self.targets.get(row.target)
        policy = (target.policy.retry if target else None) or self.backoff
        wait = policy.delay_us(row.attempt) if delay is None else delay
        return Settlement(row.id, row.token, State.PENDING, row.queue, kind, summary, wait)

    def _release(self, running: Running) -> Settlement:
        row = running.row
        return Settlement(row.id, row.token, State.PENDING, row.queue, Kind.RELEASED, None, refund=True)

    def _settle(self, running: Running, settlement: Settlement, duration: float) -> None:
        """Notes the outcome; it is written with the next turn, and renewed like every claim until then."""
        row = running.row
        again = settlement.state is State.PENDING and not settlement.refund
        running.settlement = settlement
        running.ended = events.JobEnded(
            running.work.context.id, row.target, row.queue, row.attempt, settlement.state.label,
            None if settlement.kind is None else settlement.kind.value, settlement.summary, duration,
            settlement.delay / clock.SECOND if again else None,
        )  # fmt: skip
        self.unsettled.append(running)

    def _settled(self, settling: list[Running], facts: list[Fact]) -> None:
        for running, fact in zip(settling, facts, strict=True):
            if fact is Fact.BUSY:
                self.unsettled.append(running)
                self._turn_after = time.monotonic() + 0.002  # held by a claimant's short transaction, as a rule
                continue
            self.running.pop(running.row.id, None)
            if fact is Fact.LOST:
                events.emit(events.ClaimLost(running.work.context.id, running.row.target, running.row.attempt))
            elif running.ended is not None:
                self.done += 1
                self.released += running.settlement is not None and running.settlement.refund
                events.emit(running.ended)

    def _renewed(self, renewing: list[Running], facts: list[Fact], sent: float) -> None:
        for running, fact in zip(renewing, facts, strict=True):
            if running.row.id not in self.running or self.running[running.row.id] is not running:
                continue  # settled in this very turn
            if fact is Fact.RENEWED:
                running.renew_at = sent + self.lease / 3e6
            elif fact is Fact.BUSY:
                running.renew_at = sent + min(0.05, self.lease / 2e7)
            else:
                self._lose(running)

    def _lose(self, running: Running) -> None:
        """Ours no more: tell the handler, and drop what it returns."""
        running.lost = True
        running.work.context.cancel()
        if running.settlement is not None:
            if running in self.unsettled:
                self.unsettled.remove(running)
            self._forget_lost(running)

    def _forget_lost(self, running: Running) -> None:
        self.running.pop(running.row.id, None)
        events.emit(events.ClaimLost(running.work.context.id, running.row.target, running.row.attempt))

    def _refused(self, error: QueueError) -> None:
        """The turn was rolled back by an error that a new connection does not cure: settle one by one, claim again later."""
        settling, self.unsettled = self.unsettled, []
        for running in settling:
            try:
                assert self.session is not None and running.settlement is not None
                with self.database.errors():
                    self.session.begin()
                    fact = self.dialect.settle(self.session, [running.settlement])[0]
                    self.session.commit()
                self._settled([running], [fact])
            except ConnectionLost:
                self.unsettled.append(running)
                raise
            except QueueError:  # this row is the bad one: leave it to its lease
                self._abort()
                self._lose(running)
        if not self._turn_trouble:
            self._turn_trouble = True
            events.emit(events.DatabaseTrouble(self.name, f"{type(error).__name__}: {error}"))
        self._turn_after = time.monotonic() + random.uniform(0.5, 1.0)

    def _abort(self) -> None:
        try:
            if self.session is not None:
                self.session.rollback()
        except Exception as error:
            if self.dialect.classify(error) is None:
                raise

    # -- timeouts ----------------------------------------------------------------------------------------------------

    def _watch_timeouts(self) -> None:
        """At its timeout a job's flag is set; after a grace it is settled without its thread, and the slot abandoned."""
        now = time.monotonic()
        for running in list(self.running.values()):
            if running.settlement is not None or running.work.abandoned:
                continue
            if not running.timed_out and now >= running.deadline:
                running.timed_out = True
                running.give_up_at = now + min(TIMEOUT_GRACE, self.lease / 4e6)
                running.work.context.cancel()
                timeout = (running.row.timeout_ms or 0) / 1000
                events.emit(
                    events.JobTimedOut(running.work.context.id, running.row.target, running.row.attempt, timeout)
                )
            elif running.timed_out and now >= running.give_up_at:
                self._abandon(running, now)

    def _abandon(self, running: Running, now: float) -> None:
        self.slots.abandon(running.work)
        limit = max(1, self.slots.size // 2)
        events.emit(events.SlotAbandoned(running.work.context.id, running.row.target, self.slots.abandoned, limit))
        if running.lost:
            self._forget_lost(running)
        else:
            self._settle(running, self._failed(running.row, Kind.TIMEOUT, None, None), now - running.claimed_at)
        if self.slots.abandoned >= limit and self.stopping is None:
            self.exit_code = EXIT_ABANDONED
            self.stop("too many slots hold jobs that ignore their timeout")

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        now = time.monotonic()
        assert self.session is not None
        if now >= self._upkeep_at and (self.stopping is None):
            due = self.dialect.upkeep(self.session, UPKEEP_BATCH, self.queues)
            if due.promoted or due.again:
                self._backlog = True
            if due.again or due.dead or due.unknown:
                events.emit(events.LeasesExpired(due.again, due.dead, due.unknown))
            soonest = min((t for t in (due.next_run, due.next_lease) if t is not None), default=None)
            wait = self.poll if soonest is None else min(self.poll, max(0.0, (soonest - due.now) / clock.SECOND))
            self._upkeep_at = now + wait
        elif self.stopping is not None:
            self._upkeep_at = now + self.poll
        if now >= self._prune_at:
            self._prune(now)

    def _prune(self, now: float) -> None:
        assert self.session is not None
        self.session.begin(now + min(1.0, self.lease / 4e6))
        try:
            before = self.dialect.now(self.session) - round(self.history * clock.SECOND)
            rows = self.dialect.prune(self.session, PRUNED, before, PRUNE_BATCH)
            self.session.commit()
        except BaseException:
            self._abort()
            raise
        if rows:
            events.emit(events.HistoryPruned(rows))
        self._prune_at = now + (PRUNE_PAUSE if rows >= PRUNE_BATCH else PRUNE_EVERY * random.uniform(0.8, 1.2))

    # -- the connection ----------------------------------------------------------------------------------------------

    def _connected(self) -> bool:
        if self.session is None:
            if time.monotonic() < self._turn_after:
                return False
            try:
                self.session = self.database.open_session()
                if self._lost_at is not None:
                    self._back()
            except ConnectionLost as error:
                self._connection_lost(error)
                return False
            except DatabaseBusy:
                self._connection_lost(ConnectionLost("the database is busy"))
                return False
        if self.sleeper is None and not self.options.once and time.monotonic() >= self._look_at:
            self._open_sleeper()
        return self.session is not None

    def _back(self) -> None:
        """Connected again: rows that the database thinks we hold and we do not know came in an answer that was lost."""
        assert self.session is not None
        lost_at, self._lost_at, self._reconnects = self._lost_at, None, 0
        with self.database.errors():
            released = self.dialect.release_unknown(self.session, self.name, list(self.running))
        self._backlog = True
        self._upkeep_at = 0.0
        events.emit(events.DatabaseBack(self.name, time.monotonic() - (lost_at or time.monotonic()), released))

    def _open_sleeper(self) -> None:
        assert self.session is not None
        try:
            self.sleeper = self.database.sleeper(self.session, self.queues)
        except ConnectionLost:  # polling serves meanwhile
            pass
        self._look_at = time.monotonic() + (0.0 if self.sleeper else RECONNECT_MOST)

    def _drop_sleeper(self) -> None:
        sleeper, self.sleeper = self.sleeper, None
        self._look_at = time.monotonic() + RECONNECT_FIRST
        if sleeper is not None:
            try:
                sleeper.close()
            except Exception as error:
                if self.dialect.classify(error) is None:
                    raise

    def _connection_lost(self, error: QueueError) -> None:
        session, self.session = self.session, None
        if session is not None:
            try:
                session.close()
            except Exception as closing:
                if self.dialect.classify(closing) is None:
                    raise
        self._drop_sleeper()
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            events.emit(events.DatabaseTrouble(self.name, f"{type(error).__name__}: {error}"))
        pause = min(RECONNECT_MOST, RECONNECT_FIRST * 2 ** min(self._reconnects, 10))
        self._reconnects += 1
        self._turn_after = time.monotonic() + pause * random.uniform(0.5, 1.0)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """The order: claim nothing more (``stopping`` is set); let running jobs end; past the deadline, or hurried, set their flags and
        give them a moment; hand back what is left. What cannot be handed back keeps its lease and comes back by it."""
        now = time.monotonic()
        if not self._told:
            self._told = True
            events.emit(events.WorkerStopping(self.name, str(self.stopping), len(self.running)))
        if not self._flagged and (self._hurried or now >= self._stop_until):
            self._flagged = True
            self._stop_until = now + (0.1 if self._hurried else 1.0)
            for running in self.running.values():
                running.work.context.cancel()
        elif self._flagged and (now >= self._stop_until):
            for running in list(self.running.values()):
                if running.settlement is None and not running.lost:
                    self.slots.abandon(running.work)
                    self._settle(running, self._release(running), now - running.claimed_at)
                elif running.lost:
                    self._forget_lost(running)
            self._stop_until = float("inf")
            if self._lost_at is not None:  # no database to tell: the leases do it
                self.running.clear()

    def _close(self) -> None:
        """Threads first, so that no handler meets closed connections; then the connections."""
        self.slots.close(1.0)
        if self.sleeper is not None:
            self._drop_sleeper()
        if self.session is not None:
            self.session.close()
            self.session = None
        self.wake.close()


def run_worker(queue: DBQueue, options: WorkerOptions | None = None) -> int:
    """Runs one worker in this process until SIGTERM or SIGINT: the first lets running jobs end (``shutdown`` seconds at most), the
    second hands them back at once. Returns the exit code: 0, or 75 when too many jobs ignored their timeout."""
    worker = Worker(queue, options)
    with log_events(), stop_on_signals(worker.stop):
        return worker.run()
