"""The worker: one loop thread, one connection, one transaction a turn; jobs run in slots.

Terms. A *claim* is a job that is ours until its lease ends by the database's clock. A *turn* is one round trip: settle everything
that finished since the last one, renew what is due, claim for the slots that are idle now, commit. No user code runs inside it.
While a turn is under way more slots finish, so batches form by themselves as load grows, and a lone job is settled at once.

What can fail, and what then happens:
* The process dies: its leases end, the sweep of any other worker makes the jobs claimable again; each cost an attempt (D12).
* The connection is lost: running jobs go on; after the reconnect, outcomes are settled again (a COMMIT whose answer was lost says
  "already"), and rows claimed in a transaction whose answer never came are handed back, told apart by this worker's name.
* A settle answers busy: somebody holds the row's lock just now; it is asked again in a moment. Routine, neither logged nor counted.
* A settle or renewal answers lost: the job belongs to somebody else; its flag is set and its outcome dropped (D13).
* One statement of the turn is refused: the turn is rolled back, and the next one goes row by row, so that a single bad row
  cannot stop the others; claims wait a moment.

Only this loop settles jobs. Instants in here are of time.monotonic(); every comparison with a lease is made by the database.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from msgspec.structs import replace

from dbqueue import events, ids, routing, settings
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import ClaimedRow, ClaimRequest, Turn, TurnResult
from dbqueue.errors import ConnectionLost, DatabaseBusy, DatabaseError, NotSupported, QueueError
from dbqueue.queue import DBQueue
from dbqueue.retry import Backoff
from dbqueue.runtime.claims import Claims
from dbqueue.runtime.connection import SWEEP_PAUSE, Connection
from dbqueue.runtime.execute import ForeignTarget, Work
from dbqueue.runtime.health import Health
from dbqueue.runtime.log import log_events
from dbqueue.runtime.options import MOST_SLOTS, WorkerOptions
from dbqueue.runtime.processes import ChildOptions, ProcessSlots, check_address
from dbqueue.runtime.running import NEVER, Running, blocked, obstacle, outdated, released
from dbqueue.runtime.shutdown import stop_on_signals
from dbqueue.runtime.slots import Slots, ThreadSlots
from dbqueue.runtime.stopping import Stopping
from dbqueue.runtime.upkeep import Upkeep
from dbqueue.runtime.wake import Wake
from dbqueue.states import Kind
from dbqueue.targets import Target

__all__ = ["EXIT_ABANDONED", "EXIT_CLEAN", "Worker", "WorkerOptions", "run_worker"]

log = logging.getLogger("dbqueue")

EXIT_CLEAN = 0
EXIT_BROKEN = 1
"""No child process can be had: the application cannot be imported, as a rule."""
EXIT_ABANDONED = 75
"""EX_TEMPFAIL: half of the slots hold jobs that ignore their timeout; a supervisor is to start a fresh process."""

OUTBOX_LEASE_MS = 75_000
"""On SQLite, where a lease must exceed each timeout (D18) and the usual one equals that of a delivery, if nobody says how long it is."""

SOME_REVOKED = 100
"""Revoked tasks that are read with each claim; while there are more of them, those of the claim are asked for."""

SHORTEST_HISTORY = 60.0
"""Seconds that even a switched-off history keeps succeeded jobs: a settle whose COMMIT answer was lost must be told
"already"."""
LINGER_MOST = 0.005
"""Seconds at most that a turn waits for jobs which should end in a moment."""
BUSY_FIRST, BUSY_MOST = 0.002, 0.1
"""Seconds until the next try when the whole database is busy: SQLite's write lock, a deadlock."""
BUSY_TOLD = 2.0
"""Seconds after which people are told that somebody holds a lock on the whole of it: until then it is routine."""


class Worker:
    """``run`` is the loop; ``step`` is one turn of it and returns the seconds until the next."""

    def __init__(
        self, queue: DBQueue, options: WorkerOptions | None = None, foreign: Mapping[str, ForeignTarget] | None = None
    ) -> None:
        self.queue, self.options = queue, options or WorkerOptions()
        self.options.check()
        self.database: Database = queue.database
        self.dialect = self.database.dialect
        self.outboxes = {target.name: target for target in (delivery.target() for delivery in self.options.outboxes)}
        self.targets: dict[str, Target[Any]] = queue.targets
        job_settings = queue.settings
        self.queues = self._queue_names()
        self.targets.update(self.outboxes)
        self.targets.update(foreign or {})
        self._foreign, self._revoked = bool(foreign), set[str]()
        if self.options.pool != "threads":
            for target in self.targets.values():
                check_address(target)  # one that a child cannot find is refused now, not when its job comes
        size = job_settings.workers if self.options.slots is None else self.options.slots
        self.lease = self._lease_us(job_settings)
        self.poll = job_settings.poll_ms / 1000
        self.backoff = Backoff(job_settings.retry_base_ms / 1000, job_settings.retry_max_ms / 1000)
        # D18: handlers share the pool; the loop's own connections stand outside of it.
        self.database.grow_pool(size + 1)
        # A name is used once: rows that another process claimed, or an earlier life, must never be taken for our own.
        self.name = ids.worker_id(self.options.name or socket.gethostname())
        self.health = Health(self.options.health_file, self.name, self.poll)
        self.wake = Wake()
        self.slots = self._make_slots(size)
        self.wake.also = self.slots.files
        self.connection = Connection(
            self.database, self.name, self.queues, poll=self.poll, listen=not self.options.once,
            lease=self.lease / 1e6,
        )  # fmt: skip
        self.upkeep = Upkeep(
            self.dialect, self.queues, poll=self.poll, lease=self.lease / 1e6,
            history=max(job_settings.history_ms / 1000, SHORTEST_HISTORY),
        )  # fmt: skip
        self.stopping = Stopping()
        self.claims = Claims(self.slots, self.lease, self.backoff)
        self.exit_code = EXIT_CLEAN
        self.claimed = self.left = 0
        self._backlog, self._drained = True, False
        self._claim_at = self._claim_after = self._turn_after = 0.0
        self._claims_made = 0
        self._linger_until = self._turn_takes = 0.0
        self._busy_pause = BUSY_FIRST
        self._careful = False
        self._bells: tuple[str, ...] = ()
        self._rung: Callable[[], None] = _nothing
        """Other names that the listening connection hears of, and who is told."""
        self._asked: deque[Callable[[], None]] = deque()
        """What other threads want the loop to do."""
        self._troubles: dict[str, float] = {}
        self._held_up: dict[str, float] = {}

    def _make_slots(self, size: int) -> Slots:
        if self.options.pool == "threads":
            return ThreadSlots(size, self.wake.ring)
        return ProcessSlots(size, self.wake.ring, self.options.child or ChildOptions())

    def _queue_names(self) -> tuple[str, ...]:
        given = self.options.queues
        names = given if given else tuple(sorted({t.policy.queue for t in self.targets.values()}))
        names = (*names, *self.outboxes) or ("default",)
        return tuple(dict.fromkeys(settings.check_name("queue", name, allow_reserved=True) for name in names))

    def _lease_us(self, job_settings: settings.JobSettings) -> int:
        lease_ms = job_settings.lease_ms
        if self.options.lease is not None:
            lease_ms = settings.JobSettings.from_options(lease=self.options.lease).lease_ms
        elif (
            self.outboxes and self.dialect.name == "sqlite" and lease_ms == settings.TABLES["jobs"]["lease_ms"].default
        ):
            lease_ms = OUTBOX_LEASE_MS
        settings.check_lease_rule(
            self.dialect.name,  # type: ignore[arg-type]
            lease_ms,
            {
                name: target.policy.timeout_ms
                for name, target in self.targets.items()
                if not isinstance(target, ForeignTarget)
            },
        )
        # On SQLite a job must be able to end within its claim's lease (D18); a stored one may be older than this rule.
        self._longest = lease_ms * 1_000 if self.dialect.name == "sqlite" else NEVER
        return lease_ms * 1_000

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Works until it was asked to stop and has nothing left in its hands; returns the exit code."""
        try:
            self.connection.start()
            events.emit(
                events.WorkerStarted(
                    self.name, self.database.label, self.queues, self.slots.size, self.lease / 1e6, len(self.targets)
                )
            )
            while True:
                pause = self.step()
                if self.finished:
                    break
                self._wait(pause)
        finally:
            self._close()
        claims = self.claims
        events.emit(events.WorkerStopped(self.name, claims.done, claims.released, self.left, self.exit_code))
        return self.exit_code

    @property
    def finished(self) -> bool:
        return self.stopping.begun and not self.claims

    def stop(self, reason: str = "asked to stop") -> None:
        """From any thread or a signal handler. First call: claim nothing more and let running jobs end within
        ``shutdown`` seconds. Second call: cancel them, hand them back and end."""
        self.stopping.ask(reason, self.options.shutdown)
        self.connection.hurry()
        self.wake.ring()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def at_work(self) -> list[Running]:
        """The jobs that its slots work on now."""
        return self.claims.at_work()

    def consume(self, queue: str) -> None:
        """Claims from this queue too, after its next turn at the latest."""
        self._ask(lambda: self._work_on((*self.queues, queue)))

    def cease(self, queue: str) -> None:
        """Claims no more from this queue; what runs already is not touched. Without any queue the worker waits."""
        self._ask(lambda: self._work_on(tuple(name for name in self.queues if name != queue)))

    def terminate(self, work: Work, number: int) -> None:
        """Kills a running job of a foreign target, which then tells that it was revoked, by the signal of this number. One that has
        ended meanwhile is left alone. Raises NotSupported where jobs run in threads."""
        if not self.slots.kills:
            raise NotSupported("a job in a thread cannot be killed; -P processes can do it")
        self._ask(lambda: self.claims.terminate(work, number))

    def resize(self, change: int) -> None:
        """So many slots more, or fewer; jobs that run may end. Raises NotSupported for what is less than one or more than MOST_SLOTS."""
        if not 1 <= self.slots.size + change <= MOST_SLOTS:
            raise NotSupported(f"a worker has 1 to {MOST_SLOTS} slots, and this one has {self.slots.size}")
        self._ask(lambda: self._resize(change))

    def listens_to(self, database: Database) -> bool:
        """Whether it has a connection that does nothing but listen, to this database: it can hear for others too."""
        mine = self.database
        same = database.database_id == mine.database_id and database.dialect.names == mine.dialect.names
        return same and self.dialect.listens and mine.notify and not self.options.once

    def hear(self, names: tuple[str, ...], told: Callable[[], None]) -> None:
        """Listens to these names too, in place of those that were given before; ``told`` is called when something may have come for
        one of them, by the loop, and must return at once."""

        def hear() -> None:
            self._bells, self._rung = names, told
            self._listen()
            told()

        self._ask(hear)

    def _ask(self, what: Callable[[], None]) -> None:
        self._asked.append(what)
        self.wake.ring()

    def _resize(self, change: int) -> None:
        size = max(1, min(self.slots.size + change, MOST_SLOTS))  # more than one may have asked before it came to this
        self.database.grow_pool(size + 1)
        self.slots.resize(size)
        log.info("worker %s: %d slots from now on", self.name, size)

    def _work_on(self, queues: tuple[str, ...]) -> None:
        self.queues = tuple(dict.fromkeys(queues))
        self.upkeep.watch(self.queues)
        self._listen()
        self._look_for_jobs()

    def _listen(self) -> None:
        if not (self.stopping.begun or self.options.once):
            self.connection.listen_to((*self.queues, *self._bells))

    def step(self) -> float:
        """Everything that is due now; returns the seconds until something else is."""
        while self._asked:
            self._asked.popleft()()
        self.claims.collect(stopping=self.stopping.flagged)
        if self.slots.broken is not None and not self.stopping.begun:
            self.exit_code = EXIT_BROKEN
            log.error("worker %s: %s", self.name, self.slots.broken)
            self._end("no slot is left")
        if self.claims.watch() and not self.stopping.begun:
            self.exit_code = EXIT_ABANDONED
            self._end("too many slots hold jobs that ignore their timeout")
        if self.stopping.begun:
            self._shut_down()
        if self.connection.ready(self.claims.known):
            try:
                self._turn()
                self._maintain()
                self._end_if_done()
            except ConnectionLost as error:
                self.connection.lost(error)
            except DatabaseBusy as error:  # of the whole database: SQLite's write lock, a deadlock, a locked table
                self._busy("turn", error)
                self._turn_after = time.monotonic() + self._busy_pause * random.uniform(0.5, 1.5)
                self._busy_pause = min(self._busy_pause * 2, BUSY_MOST)
            except QueueError as error:
                self._refused(error)
        self.health.beat(
            len(self.claims),
            self.connection.session is not None,
            self.connection.answered_at,
            stopping=self.stopping.begun,
        )
        return self._pause()

    def _wait(self, seconds: float) -> None:
        sleeper = self.connection.sleeper
        if sleeper is not None and sleeper.interval is not None and not self._capacity:
            sleeper = None  # news are of no use now, and looking for them costs something
        heard = False

        def wait() -> None:
            nonlocal heard
            heard = self.wake.wait(seconds, sleeper)

        self.connection.attempt(wait)
        if heard:
            self._rung()
        # Without an idle slot there is no hurry: the next settle claims, and the next sleep looks at everything.
        if heard and self._capacity:
            self._look_for_jobs()

    def _look_for_jobs(self) -> None:
        self._backlog = True
        self.upkeep.soon()

    def _pause(self) -> float:
        connected = self.connection.session is not None
        times = [self.claims.next_at(connected=connected)]
        if connected and not self.stopping.begun:
            times.append(self.upkeep.next_at)
            if self._capacity:
                times.append(self._claim_after if self._backlog else max(self._claim_at, self._claim_after))
        next_at = max(min(times), self._turn_after, self._linger_until) if connected else times[0]
        next_at = min(next_at, self.connection.next_at, self.stopping.next_at, self.health.next_at)
        return max(0.0, next_at - time.monotonic())

    def _end(self, reason: str) -> None:
        self.stopping.begin(reason, self.options.shutdown)

    def _end_if_done(self) -> None:
        if not self.claims and not self.stopping.begun:
            if self.options.max_jobs is not None and self.claimed >= self.options.max_jobs:
                self._end("all the jobs that were asked for are done")
            elif self.options.once and self._drained:
                self._end("nothing is due")

    # -- one turn ----------------------------------------------------------------------------------------------------

    @property
    def _capacity(self) -> int:
        """How many jobs may be claimed now."""
        if self.stopping.begun or not self.queues:
            return 0
        most = self.options.max_jobs
        return self.slots.idle if most is None else max(0, min(self.slots.idle, most - self.claimed))

    def _turn(self) -> None:
        """Settle, renew, claim."""
        now = time.monotonic()
        if now < self._turn_after:
            return
        self._bury()
        settling, renewing = self.claims.to_settle(now), self.claims.to_renew(now)
        if self._careful:
            self._one_by_one(settling, renewing, now)
            return
        if settling and not renewing and self._lingers(now):
            return
        self._linger_until = 0.0
        claim = self._claim_request(now, bool(settling))
        if settling or renewing or claim is not None:
            result = self._exchange(settling, renewing, claim, now)
            if claim is not None:
                self._started(claim, result, now)

    def _lingers(self, now: float) -> bool:
        """A turn for two jobs costs little more than one for one of them. So it waits for those that should end before half of it were
        over; slow jobs wait for nobody, nor does anybody wait for them."""
        moment = min(self._turn_takes / 2, LINGER_MOST)
        if self.stopping.begun or not self.claims.others_end_soon(now, moment):
            return False
        self._linger_until = self._linger_until or now + moment
        return now < self._linger_until

    def _exchange(
        self, settling: Sequence[Running], renewing: Sequence[Running], claim: ClaimRequest | None, now: float
    ) -> TurnResult:
        session = self.connection.session
        assert session is not None
        settlements = [running.settlement for running in settling if running.settlement is not None]
        asks = claim is not None and self._foreign  # what is revoked
        looks = [routing.some_revoked(self.dialect, SOME_REVOKED)] if asks else ()
        turn = Turn(settlements, [running.held for running in renewing], self.lease, claim, looks)
        try:
            with self.database.errors():
                result = self.dialect.turn(session, turn)
                self._turn_takes += (time.monotonic() - now - self._turn_takes) / 8
                self._revoked = set()
                if asks and result.claimed:
                    self._revoked = self._ask_revoked(session, result)
        except QueueError:
            raise
        except Exception as error:
            # Not the database's: a value that the driver cannot send, or a defect. Neither may end the worker.
            log.exception("worker %s: a turn failed", self.name)
            raise DatabaseError(f"the turn failed ({type(error).__name__})") from error
        self._busy_pause = BUSY_FIRST
        self._not_busy("turn")
        self.connection.worked()
        self.claims.settled(settling, result.settled)
        self.claims.renewed(renewing, result.renewed, now)
        self.upkeep.soon(self.claims.next_retry)
        self.claims.next_retry = NEVER
        return result

    def _ask_revoked(self, session: OwnSession, result: TurnResult) -> set[str]:
        try:
            return self._revoked_among(session, result)
        except (
            Exception
        ) as error:  # the claims are committed, and nobody knows of them yet: a lost connection hands them back
            raise ConnectionLost("which of the claimed tasks are revoked could not be asked") from error

    def _revoked_among(self, session: OwnSession, result: TurnResult) -> set[str]:
        """A task may be revoked before its message is written. Asked after the claim, so that no revoke that was there before the
        message is missed; what cannot be asked is handed back with the connection."""
        told = {str(row[0]) for row in result.more[0]}
        if len(told) < SOME_REVOKED:
            return told
        targets = [(row, self.targets.get(row.target)) for row in result.claimed]
        names = {name for row, target in targets if isinstance(target, ForeignTarget) for name in target.names(row)}
        return routing.revoked_among(self.dialect, session, sorted(names)) if names else set()

    def _claim_request(self, now: float, settling: bool) -> ClaimRequest | None:
        capacity, session = self._capacity, self.connection.session
        if self.connection.news:
            self.connection.news = False
            self._look_for_jobs()
            self._rung()
        if not capacity or now < self._claim_after or not (self._backlog or now >= self._claim_at or settling):
            return None
        if self.dialect.probes and not settling and session is not None:
            with self.database.errors():
                if not self.dialect.probe(session, self.queues):
                    self._went_well("turn")
                    self._nothing_found(now, whole=True)
                    return None
        # Several queues take turns: each claim begins with another one.
        first = self._claims_made % len(self.queues)
        self._claims_made += 1
        queues = self.queues[first:] + self.queues[:first]
        return ClaimRequest(queues, capacity, self.name, ids.new_token(), self.lease)

    def _started(self, claim: ClaimRequest, result: TurnResult, sent: float) -> None:
        """Hands what was claimed to the slots. ``sent`` is before the database wrote the lease, so our idea of it
        ends early."""
        rows = result.claimed
        self.claimed += len(rows)
        self._went_well("turn")
        for row in rows:
            self._start(row, sent)
        if claim.filled_by(len(rows)):
            self._backlog, self._drained = True, False
        else:
            self._nothing_found(sent, whole=result.whole)
        if not self._capacity:
            self._claim_at = 0.0  # the next idle slot claims, however it became idle
            self.connection.wake()

    def _nothing_found(self, now: float, *, whole: bool) -> None:
        self._backlog, self._drained = False, False
        if not whole:
            self._claim_at = now + SWEEP_PAUSE
        elif self.options.once:
            self._drained = True  # unless upkeep, which looks at once, finds something due
            self._claim_at = now + self.poll
            self.upkeep.soon()
        elif self._capacity:
            self._claim_at = self.connection.claim_again_at(now)
            if self._claim_at <= now:  # jobs that become due soon, too, may have been written without a ring
                self.upkeep.soon()

    def _bury(self) -> None:
        """Before anything is claimed: jobs that are over wait for their targets to tell so."""
        while self.slots.idle and (running := self.claims.to_bury()) is not None:
            if running not in self.claims or running.settlement is not None or running.lost:
                continue
            self._starting(running)
            if not self.slots.start(running.work):
                self.claims.end(running, released(running.row))

    def _start(self, row: ClaimedRow, sent: float) -> None:
        target, kind = self.targets.get(row.target), None
        if isinstance(target, ForeignTarget) and target.opens:
            try:
                row, target = target.opened(row)
            except Exception as error:
                kind = _unreadable(row, error)
        running = self.claims.add(row, target, sent)
        kind = kind or obstacle(row, target, self._longest)
        wait, ending = 0, None
        if isinstance(target, ForeignTarget):
            now = row.lease_until - self.lease
            try:
                ending, wait, running.work.verdict = (
                    target.ending(row, now),
                    target.waits(row, now),
                    target.verdict(row, now),
                )
                if self._revoked and not self._revoked.isdisjoint(target.names(row)):
                    wait, running.work.verdict = 0, Kind.REVOKED
            except Exception as error:
                kind = _unreadable(row, error)
        if kind is not None:
            self.claims.end(running, blocked(row, kind))
        elif ending is not None:
            self.claims.end(running, ending)
        elif wait > 0:
            self.claimed -= 1
            self.claims.end(running, replace(released(row), delay=wait))
        elif not isinstance(target, ForeignTarget) and (end := outdated(row, self.lease)) is not None:
            self.claims.end(running, end)
        else:
            self._give(running)

    def _starting(self, running: Running) -> None:
        target = running.work.target
        if isinstance(target, ForeignTarget):
            try:
                target.starting(running.work)
            except Exception as error:  # it is told to monitors only
                log.error(
                    "job %s %s cannot be told: %s", running.work.context.id, running.row.target, type(error).__name__
                )

    def _give(self, running: Running) -> None:
        """To a slot."""
        row, target = running.row, running.work.target
        self._starting(running)
        if not self.slots.start(running.work):
            self.claims.end(running, released(row))
            return
        if isinstance(target, ForeignTarget):
            target.started(running.work)
        if events.wanted(events.JobStarted):
            events.emit(events.JobStarted(running.work.context.id, row.target, row.queue, row.attempt))

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _refused(self, error: QueueError) -> None:
        """The turn was rolled back by an error that a new connection does not cure: what is held goes row by row,
        claims wait."""
        self._careful, self._drained = True, False
        self._claim_after = time.monotonic() + random.uniform(0.5, 1.0)
        self._trouble("turn", error)

    def _trouble(self, what: str, error: QueueError) -> None:
        """Told once, until it goes well again."""
        if what not in self._troubles:
            self._troubles[what] = time.monotonic()
            events.emit(events.DatabaseTrouble(self.name, f"{type(error).__name__}: {error}"))

    def _went_well(self, what: str) -> None:
        since = self._troubles.pop(what, None) if self._troubles else None
        if since is not None:
            events.emit(events.DatabaseBack(self.name, time.monotonic() - since, 0))

    def _busy(self, what: str, error: QueueError) -> None:
        if time.monotonic() - self._held_up.setdefault(what, time.monotonic()) >= BUSY_TOLD:
            self._trouble("lock", error)

    def _not_busy(self, what: str) -> None:
        if self._held_up and self._held_up.pop(what, 0.0) and not self._held_up:
            self._went_well("lock")

    def _one_by_one(self, settling: Sequence[Running], renewing: Sequence[Running], now: float) -> None:
        """After a refusal: every row on its own. An error that is not the row's own leaves the rest for the next
        try."""
        for running in settling:
            try:
                self._exchange([running], [], None, now)
            except (ConnectionLost, DatabaseBusy):
                raise
            except QueueError:
                self.claims.refused(running)
        for running in renewing:
            try:
                if running in self.claims:
                    self._exchange([], [running], None, now)
            except (ConnectionLost, DatabaseBusy):
                raise
            except QueueError:
                self.claims.not_renewed(running, now)
        self._careful = bool(self.claims.to_settle(now))

    # -- upkeep and the end ------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        session = self.connection.session
        if session is None or self.stopping.begun:
            return
        try:
            with self.database.errors():
                found = self.upkeep.run(session)
        except ConnectionLost:
            raise
        except DatabaseBusy as error:
            self._drained = False
            self._busy("upkeep", error)
        except QueueError as error:
            self._drained = False
            self._trouble("upkeep", error)
        else:
            if found is not None:
                self._not_busy("upkeep")
                self._went_well("upkeep")
                self.connection.worked()
            if found:
                self._backlog, self._drained = True, False

    def _shut_down(self) -> None:
        """The order: claim nothing more; let running jobs end; past the deadline, or hurried, set their flags and
        give them a moment; hand back what is left. What cannot be handed back in time keeps its lease and comes back
        by it."""
        now = time.monotonic()
        if self.stopping.told():
            self.connection.stop_listening(for_good=True)
            events.emit(events.WorkerStopping(self.name, str(self.stopping.reason), len(self.claims)))
        if self.stopping.flag_due(now):
            self.claims.cancel()
        elif self.stopping.hand_back_due(now):
            self.claims.hand_back()
        elif self.stopping.leave_due(now):
            self.left = self.claims.leave()

    def _close(self) -> None:
        """Threads first, so that no handler meets closed connections; then the connections. A thread that was
        abandoned is not waited for: its job may be running elsewhere already, and the sooner this process ends, the
        better."""
        self.health.close()
        self.claims.cancel()
        self.slots.close(0.1 if self.slots.busy else 1.0)
        self.connection.close()
        self.wake.close()


def _unreadable(row: ClaimedRow, error: Exception) -> Kind:
    """Others wrote it: what cannot be read must not end the worker."""
    log.error("job %s %s cannot be read: %s", ids.as_uuid(row.id), row.target, type(error).__name__)
    return Kind.CORRUPT_PAYLOAD


def _nothing() -> None: ...


def run_worker(
    queue: DBQueue,
    options: WorkerOptions | None = None,
    foreign: Mapping[str, ForeignTarget] | None = None,
    beside: Callable[[Worker], AbstractContextManager[object]] = nullcontext,
) -> int:
    """Runs one worker in this process until SIGTERM or SIGINT: the first lets running jobs end (``shutdown`` seconds
    at most), the second hands them back at once. ``beside`` is what is there as long as it runs. Returns the exit code: 0, or 75 when
    too many jobs ignored their timeout."""
    worker = Worker(queue, options, foreign)
    with log_events(), stop_on_signals(worker.stop), beside(worker):
        return worker.run()
