"""One process's work on one database: a thread with a session of its own that claims, renews, settles and reads for all channels.

The thread is what keeps a promise when nobody else runs: it renews claims while a solo worker's task blocks the event loop, writes
acks after the loop has ended, and goes on through a reconnect. Nothing in it runs the application's code: what it claims lies in
the channels' inboxes until kombu's own thread takes it. It claims only what a channel wants now, in one round trip together with
the settlements that piled up during the last one.

What can fail, and what then happens:
* The process dies: leases end, and any other process's sweep brings its messages back.
* The connection is lost: the thread makes a new one, further and further apart; acks wait in the ledger. Once a lease must have
  ended meanwhile, the channels are told by ConnectionLost, so that Celery drops what it has not started.
* A settle answers busy: asked again in a moment. Lost: the message belongs to somebody else, its ack changes nothing.
* A fork: the child has none of this, and begins anew with its first use.

Over 400 lines, because what other threads ask and what the thread does share its state, and are read side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from dbqueue import ids, routing
from dbqueue.database import joined
from dbqueue.database.alive import Alive
from dbqueue.database.dialect import OwnSession, Session
from dbqueue.database.engine import Database, denial
from dbqueue.database.postgres import Postgres
from dbqueue.database.tables import ClaimedRow, ClaimRequest, Fact, Held, NewJob, Turn, TurnResult
from dbqueue.database.wakeup import BELL
from dbqueue.errors import ConfigError, ConnectionLost, DatabaseBusy, QueueError
from dbqueue.kombu_transport import ledger as ends
from dbqueue.kombu_transport import recorded
from dbqueue.kombu_transport.express import GUARD, Express
from dbqueue.kombu_transport.housekeeping import Housekeeping
from dbqueue.kombu_transport.ledger import Delivery, Ledger
from dbqueue.kombu_transport.message import NOTICE, id_of, is_control, rank_of
from dbqueue.kombu_transport.options import Options
from dbqueue.mail import Binding, Item, Mail, bells, control_since
from dbqueue.queue import open_database
from dbqueue.routing import Route
from dbqueue.runtime.connection import CLAIM_ANYWAY, SWEEP_PAUSE, Connection
from dbqueue.runtime.idle import IdleSessions
from dbqueue.runtime.running import NEVER
from dbqueue.runtime.upkeep import Upkeep
from dbqueue.runtime.wake import Wake

log = logging.getLogger("dbqueue.kombu")

T = TypeVar("T")

FACTS_FOR = 10.0
"""Seconds for which what was declared about a queue is remembered."""
GATHER = 0.001
FEW = 64
"""Acks that may be held back."""
MOMENT = 0.005
"""Seconds that they are held back, and that a claim for an idle consumer gives it before there is a look for more."""
MOST_CLAIMED = 64
MOST_LAPSES = 20
"""Leases lost in the hands of consumers, after which a message is dead: it kills whoever takes it."""
SOME_REVOKED = 100
"""Revoked tasks that are read with each claim; when there are more, each claim asks for its own."""
LINGER = 2.0
"""Seconds that the thread keeps its session when nobody consumes and nothing is held any more, and that it stays after the last
connection was closed."""
RESTING = 60.0
CLOSE_PATIENCE = 5.0


class Inbox(Protocol):
    """A channel, as the station's thread sees it."""

    key: int
    window: int
    """How many messages it may have in its hands; 0: any number."""
    brief: bool
    """It consumes queues of short-lived messages only."""

    def wanted(self) -> int:
        """How many messages may be claimed for it now."""

    def queues(self) -> tuple[str, ...]:
        """Whose messages it consumes."""

    def letters(self) -> list[tuple[str, tuple[Binding, ...]]]:
        """The brief queues it consumes, with their bindings."""

    def wants_letters(self) -> bool: ...

    def put(self, deliveries: list[Delivery]) -> None: ...
    def put_letters(self, queue: str, letters: list[Item]) -> None: ...
    def trouble(self, error: ConnectionLost | None) -> None: ...


@dataclass(frozen=True)
class Request:
    """What one turn asks for, and of whom."""

    turn: Turn
    settling: list[Delivery]
    renewing: list[Delivery]
    channel: Inbox | None
    """For which the turn claims."""
    at: float


class Station:
    def __init__(self, options: Options) -> None:
        self.options = options
        settings = options.settings
        self.database: Database = open_database(settings)
        self.dialect = self.database.dialect
        self.mail = Mail(self.database)
        self._idle = IdleSessions(self.database)
        self.name = ids.worker_id(f"kombu@{socket.gethostname()}")
        self.lease = settings.lease_ms * 1_000
        self.ledger = Ledger(self.lease)
        self.pid = os.getpid()
        self._poll = settings.poll_ms / 1_000
        self._lock = threading.RLock()
        self._channels: dict[int, Inbox] = {}
        self._users = 0
        self._thread: threading.Thread | None = None
        self._alive: Alive | None = None
        self._wake = Wake()
        self._closed = False
        self._idle_since: float | None = None
        self._needed_at = -LINGER
        self._facts: dict[str, tuple[float, Route | None]] = {}
        self._connection = Connection(self.database, self.name, (), poll=self._poll, listen=False)
        self._upkeep = Upkeep(
            self.dialect, (), poll=self._poll, lease=self.lease / 1e6, history=max(settings.history_ms / 1_000, 60.0)
        )
        self._claimed: list[tuple[Inbox, Delivery]] = []
        self._letters: list[tuple[Inbox, str, Item]] = []
        """Read, and not handed over yet."""
        self._turns = 0
        self._backlog: dict[int, bool] = {}
        self._claim_at: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}
        self._mail_at = 0.0
        self._changed = True
        self._housekeeping = Housekeeping(self.database, self.mail, self.name)
        self._not_before = 0.0
        self._careful = False
        self._told = False
        self._complaint = ""
        self._settled = threading.Condition()
        self.at_work = threading.Lock()
        """Who holds it may use the session."""
        self._express: Express | None = None
        self._elsewhere: Callable[[tuple[str, ...]], None] | None = None
        """Told the names to listen to: another connection of this process hears for this station too."""
        self._ended: Express | None = None
        """One that drives no more, and may have left a turn in the air."""
        self._sleeps_until = NEVER
        self._gathers_since: float | None = None
        """Since when the event loop lets acks pile up."""
        self._releases_begun = self._releases_ended = 0
        """Looks for claims that this process does not know, after a reconnect."""
        self._seen = 0
        """The last short-lived message that the event loop knows of."""
        self._dry: set[int] = set()
        """Channels for which the event loop found nothing."""

    # -- for kombu's threads -----------------------------------------------------------------------------------------

    def run(self, verb: Callable[[Session], T]) -> T:
        """A verb on a pooled connection, in a short transaction of its own."""
        self._ready()
        return self.database.run(verb)

    def read(self, verb: Callable[[Session], T]) -> T:
        self._ready()
        return self.database.read(verb)

    def check(self) -> None:
        """Raises unless the database answers, and has its tables: ConnectionLost, or ConfigError if it turned the URL down and has
        never been reached by it. Later the same is a lost connection: a password may be changed while we run."""
        try:
            self._ready()
            self.database.read(lambda session: session.execute("SELECT 1"))
        except ConnectionLost as error:
            reason = denial(error)
            if reason is None or self.options in _reached:
                raise
            raise ConfigError(f"the broker URL {self.database.label} is turned down: {reason}. Correct it") from error
        _reached.add(self.options)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Consumers whose channel was closed while the database could not be reached would count as long as this process lives."""
        for tag, queue in list(_orphans.get(self.options, {}).items()):
            self.database.run(lambda s, tag=tag, queue=queue: routing.remove_consumer(self.dialect, s, tag, queue))  # type: ignore[misc]
            _orphans[self.options].pop(tag, None)

    def orphan(self, tag: str, queue: str) -> None:
        """This consumer's row could not be removed."""
        _orphans.setdefault(self.options, {})[tag] = queue

    def _ready(self) -> None:
        """Inside a caller's transaction nothing is created: on SQLite it may hold the one write lock."""
        if joined.current() is None:
            self.database.ready()
        else:
            self.database.check_ready()

    def facts(self, queue: str) -> Route | None:
        """What was declared about the queue; None: nothing."""
        known = self._facts.get(queue)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        return self.learn(queue, self.read(lambda session: routing.find_queue(self.dialect, session, queue)))

    def learn(self, queue: str, route: Route | None) -> Route | None:
        if len(self._facts) > 10_000:
            self._facts.clear()
        self._facts[queue] = (time.monotonic() + FACTS_FOR, route)
        return route

    def forget(self, queue: str) -> None:
        self._facts.pop(queue, None)

    def recorded(self) -> list[Any] | None:
        """Where this thread's messages go instead of being written; None: they are written."""
        self._ready()
        return recorded.entries_for(self.database.database_id)

    def write(self, jobs: list[NewJob]) -> None:
        """Enqueues in one transaction of its own, unless this thread's messages are recorded. An answer that was lost with the connection
        is looked up, the ids being ours."""
        entries = self.recorded()
        if entries is not None:
            entries.extend(jobs)
        else:
            self._write(jobs)

    def write_all(self, jobs: list[NewJob], *, look_first: bool) -> QueueError | None:
        """As ``write`` for messages of several publishers. If the database refuses what they are, each is written alone, and the first
        error of one that was refused is returned. ``look_first``: some or all may have been written by now."""
        self._ready()
        jobs = self._missing(jobs) if look_first else jobs
        try:
            self._write(jobs)
            return None
        except (ConnectionLost, DatabaseBusy):
            raise
        except QueueError as error:
            if len(jobs) == 1:
                return error
        refusals = [self.write_all([job], look_first=True) for job in jobs]
        return next((error for error in refusals if error is not None), None)

    def _write(self, jobs: list[NewJob]) -> None:
        try:
            self._insert(jobs)
        except ConnectionLost:
            self._insert(self._missing(jobs))

    def _insert(self, jobs: list[NewJob]) -> None:
        run = self.database.run if self.dialect.name == "sqlite" else self.database.single
        if len(jobs) == 1:
            run(lambda session: self.dialect.enqueue(session, jobs[0]))
        elif jobs:
            run(lambda session: self.dialect.insert_due(session, jobs))

    def _missing(self, jobs: list[NewJob]) -> list[NewJob]:
        return self.database.read(lambda s: [job for job in jobs if not self.dialect.exists(s, job.id)])

    def claim_one(self, queue: str, owner: int) -> Delivery | None:
        """For basic_get. What cannot be delivered is settled here and the next one taken."""
        self.database.ready()
        for _ in range(1_000):
            with self.database.session() as session:
                sent, releases = time.monotonic(), self._releases_ended
                request = ClaimRequest((queue,), 1, self.name, ids.new_token(), self.lease)
                result = self.dialect.turn(session, Turn(claim=request))
                if not result.claimed:
                    due = self.dialect.upkeep(session, 100, (queue,))
                    if not (due.promoted or due.again):
                        return None
                    result = self.dialect.turn(session, Turn(claim=request))
            for row in result.claimed:
                delivery = self._take(row, owner, sent, result.now)
                self.wake()  # it has a claim to renew, or an end to write
                if delivery is not None and self._may_have_released(releases) and not self._is_ours(session, delivery):
                    self.ledger.settle(delivery.tag, ends.handed_back)
                elif delivery is not None:
                    self._mark_revoked(session, [delivery])
                    if not delivery.revoked:
                        return delivery
                    self.ledger.settle(delivery.tag, ends.acked)
        return None

    def _may_have_released(self, ended: int) -> bool:
        """Whether the station's thread, connected anew, has looked for claims that it does not know since so many looks had ended, and
        may have handed back one that had just been made and did not stand in the ledger yet."""
        return self._releases_begun != ended

    def _is_ours(self, session: Session, delivery: Delivery) -> bool:
        with self.at_work:
            pass  # the look has ended
        try:
            with self.database.errors():
                return self.dialect.renew(session, [delivery.held], self.lease) == [Fact.RENEWED]
        except BaseException:
            self.ledger.settle(delivery.tag, ends.handed_back)
            raise

    def _known(self) -> list[Held]:
        self._releases_begun += 1
        return self.ledger.known()

    def attach(self, inbox: Inbox) -> None:
        """From now on the thread claims and reads for this channel."""
        with self._lock:
            self._channels[inbox.key] = inbox
        self.news(inbox.key)

    def detach(self, inbox: Inbox) -> None:
        with self._lock:
            attached = self._channels.pop(inbox.key, None)
            self._backlog.pop(inbox.key, None)
            self._claim_at.pop(inbox.key, None)
            self._asked_at.pop(inbox.key, None)
            self._dry.discard(inbox.key)
        if attached is not None:  # who only publishes needs no thread
            self._changed = True
            self.wake()

    def news(self, key: int) -> None:
        """The channel may have something to claim: it consumes another queue, say."""
        self._backlog[key] = True
        self._mail_at = 0.0
        self._changed = True
        self.wake()

    def wake(self) -> None:
        """There is something to do: settle, claim for a window that opened, go away."""
        if self._thread is None:
            self._start()
        express, now = self._express, time.monotonic()
        if express is not None and express.drives(now):
            if not express.here:
                express.ring()
            if self._sleeps_until < now + 2 * GUARD:
                return  # and looks then whether the loop has done it
        self._wake.ring()

    def ring(self) -> None:
        self._wake.ring()

    def listen_elsewhere(self, listen: Callable[[tuple[str, ...]], None]) -> None:
        """One session less: from now on ``listen`` is called, on the station's thread, with the names that it would listen to; whoever
        listens to them calls ``heard``."""
        self._elsewhere = listen
        self._changed = True

    def heard(self) -> None:
        """From any thread: there is news for one of the names."""
        self._connection.news = True
        self._wake.ring()

    def drive(self, loop: Any, ring: Callable[[], None], on_readable: Callable[[], None]) -> Express | None:
        """An event loop settles and claims itself while it turns. None: not here, or another one does already."""
        if self._express is not None or not isinstance(self.dialect, Postgres):
            return None
        self._express = Express(self, self.dialect, loop, ring, on_readable)
        return self._express

    def stop_driving(self, express: Express) -> None:
        if self._express is express:
            self._ended, self._express = express, None
            self._wake.ring()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed and os.getpid() == self.pid:
                self._alive = self._alive or self.dialect.live(self.name)
                self._thread = threading.Thread(target=self._work, name="dbqueue-kombu", daemon=True)
                self._thread.start()

    def flush(self, patience: float) -> bool:
        """Waits until everything that was acked or given back is written; False: not within ``patience`` seconds."""
        until = time.monotonic() + patience
        with self._settled:
            while self.ledger.settling and (left := until - time.monotonic()) > 0:
                if self._express is not None:
                    self._express.stand_back()  # again: a bell counts on the loop
                self.wake()
                self._settled.wait(min(left, 0.05))
        return not self.ledger.settling

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._finished():
                self._wait(self._step())
        except Exception:
            log.exception("dbqueue's thread for %s ended", self.database.label)
        finally:
            with self.at_work:
                self._connection.close()
            with self._lock:
                self._thread = None
                if self._closed:
                    self._dispose()

    def _finished(self) -> bool:
        """Nobody has a connection, and nothing is held: running tasks may outlive their connection."""
        if self._closed:
            return True
        if self._users or len(self.ledger):
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        with _stations_lock:
            if self._users == 0 and time.monotonic() - self._idle_since >= LINGER:
                _stations.pop(self.options, None)
                self._closed = True
        return self._closed

    def _dispose(self) -> None:
        self._idle.close()
        self.mail.close()
        self.database.close()
        if self._alive is not None:
            self._alive.close()
        self._wake.close()

    def _step(self) -> float:
        """Everything that is due now; returns the seconds until something else is."""
        express = self._express
        if express is not None and express.drives(time.monotonic()) and not self._is_asked_for():
            return self._pause()
        with self.at_work:
            more = self._do_what_is_due()
        if express is not None:
            express.let_go()
        return 0.0 if more else self._pause()

    def _is_asked_for(self) -> bool:
        """Whether something is due that an event loop which settles and claims leaves to the thread."""
        express = self._express
        waiting = self._ended or self._dry or self._letters or self._claimed
        changed = self._changed or self._connection.news or self._careful or self._closed
        failed = express is None or express.failed
        return bool(waiting or changed or failed) or self._own_time() <= time.monotonic()

    def _own_time(self) -> float:
        """When the thread has something to do that nobody else does."""
        times = (self._connection.next_at, self.ledger.next_renewal(), self._upkeep.next_at, self._housekeeping.next_at)
        return min(*times, self._mail_at if self._letters_wanted() else NEVER)

    def _do_what_is_due(self) -> bool:
        now = time.monotonic()
        try:
            self._land()
            if now < self._not_before:
                return False
            if self._needed():
                self._needed_at = now
            elif now - self._needed_at >= LINGER:
                self._connection.rest()
                return False
            try:
                ready = self._connection.ready(self._known)
            finally:
                self._releases_ended = self._releases_begun
            if ready:
                self._listen()
                while self._dry:
                    self._nothing(self._dry.pop(), now)
                more = self._round()
                self._house()
                self._told, self._complaint = False, ""
                return more
            elif self.ledger.overdue(now):
                self._tell(ConnectionLost("the database could not be reached for longer than a lease"))
        except ConnectionLost as error:
            self._connection.lost(error)
        except DatabaseBusy:
            self._not_before = time.monotonic() + random.uniform(0.002, 0.05)
        except QueueError as error:
            self._careful = True
            self._not_before = time.monotonic() + random.uniform(0.5, 1.0)
            if str(error) != self._complaint:  # once, until it goes well again
                self._complaint = str(error)
                log.error("dbqueue's transport: %s", error)
        except Exception:
            self._not_before = time.monotonic() + 1.0
            log.exception("dbqueue's transport failed")
        return False

    def _land(self) -> None:
        """What the event loop sent and has not taken yet."""
        ended, self._ended = self._ended, None
        for express in (ended, self._express):
            if express is not None:
                express.land()

    def _needed(self) -> bool:
        """Somebody consumes, or something is held."""
        return bool(self._channels) or len(self.ledger) > 0

    def _tell(self, error: ConnectionLost) -> None:
        if not self._told:
            self._told = True
            for channel in self._inboxes():
                channel.trouble(error)

    def _inboxes(self) -> list[Inbox]:
        with self._lock:
            return list(self._channels.values())

    def _listen(self) -> None:
        if self._connection.news:
            self._connection.news = False
            self._heard()
        if not self._changed:
            return
        self._changed = False
        names = dict.fromkeys(queue for channel in self._inboxes() for queue in channel.queues())
        self._upkeep.watch(tuple(names))
        for channel in self._inboxes():
            for queue, bindings in channel.letters():
                names.update(dict.fromkeys(bells("", queue)))
                names.update(dict.fromkeys(bell for exchange, _, _ in bindings for bell in bells(exchange, "")))
        if self._elsewhere is None:
            self._connection.listen_to(tuple(names))
        else:
            self._elsewhere(tuple(names))

    def _heard(self, rung: set[str] | None = None) -> None:
        """``rung``: the names, if that is known: a message for one queue is no reason to look into all, nor for letters."""
        for channel in self._inboxes():
            if rung is None or not rung.isdisjoint(channel.queues()):
                self._backlog[channel.key] = True
        if rung is None or any(name.startswith(BELL) for name in rung):
            self._mail_at = 0.0
        # Not before the claim of an event loop: of what it rang for, that one finds nearly all.
        self._upkeep.soon(0.0 if self._express is None else time.monotonic() + GUARD)

    def _round(self) -> bool:
        """A turn, and the letters; handed over in the order in which one process has published them: a revoke goes before a task that
        was sent after it, and a question after a task that was sent before it. Returns whether there is more to do at once."""
        self._letters += self._read_mail()
        asked = any(is_control(letter.exchange) for _, _, letter in self._letters)
        if asked:  # what was published before it is there now
            for channel in self._inboxes():
                self._backlog[channel.key] = True
        try:
            more = self._turn(asked=asked)
            for _ in self._inboxes() if asked else ():
                more = more and self._turn(asked=asked)  # every channel's
        finally:
            self._hand_over()
        return more or bool(self._letters)

    def hand_over(self, result: TurnResult) -> None:
        """On the event loop's thread: what it claimed, at once."""
        last, asked = result.more[1][0]
        self._seen = last or self._seen
        self._hand_over(look=bool(asked))
        if self._letters:
            self._wake.ring()

    def _hand_over(self, *, look: bool = True) -> None:
        jobs, self._claimed = self._claimed, []
        letters, self._letters = self._letters, []
        try:
            if jobs and look:
                # What was written between the look at the letters and the claim may be older than a job of the claim.
                youngest = max(delivery.row.id for _, delivery in jobs)
                late = self._read_mail(control=True)
                letters += [item for item in late if id_of(item[2]) < youngest]
                self._letters = [item for item in late if id_of(item[2]) >= youngest]
        finally:  # a look that failed keeps nobody waiting
            ages = [(id_of(letter), channel, queue, letter) for channel, queue, letter in letters]
            ready: list[tuple[Inbox, Delivery]] = []
            for owner, delivery in jobs:
                older = [entry for entry in ages if entry[0] < delivery.row.id]
                if older:
                    ages = [entry for entry in ages if entry[0] >= delivery.row.id]
                    _put(ready)
                    ready = []
                    for _, channel, queue, letter in older:
                        channel.put_letters(queue, [letter])
                ready.append((owner, delivery))
            _put(ready)
            for _, channel, queue, letter in ages:
                channel.put_letters(queue, [letter])

    def _turn(self, *, asked: bool) -> bool:
        """Settle, renew, claim for one channel. Returns whether there is more to do at once. ``asked``: it cannot be left to the event
        loop, since remote control waits for it."""
        now = time.monotonic()
        if self._express is not None and self._express.drives(now) and not self._careful and not asked:
            if renewing := self.ledger.to_renew(now):
                self._exchange(self._request([], renewing, None, None, now))
            return False
        self._gather()
        self._gathers_since = None
        settling, renewing = self.ledger.to_settle(now), self.ledger.to_renew(now)
        if self._careful:
            self._one_by_one(settling, renewing)
            return False
        channel, claim, more = self._claim(now, bool(settling))
        if settling or renewing or claim is not None:
            self._exchange(self._request(settling, renewing, channel, claim, now))
        return more

    @property
    def session(self) -> OwnSession | None:
        return self._connection.session

    def has_request(self) -> bool:
        """A quick look, for the event loop."""
        ended, now = self.ledger.settling, time.monotonic()
        if not ended:
            self._gathers_since = None
            return self._wants_claim(now)
        if self._can_wait(ended):
            return not self._are_fresh(now, GUARD)
        return not self._hold_back(now)

    def _are_fresh(self, now: float, seconds: float) -> bool:
        """Whether the first of the acks that wait came just now."""
        if self._gathers_since is None:
            self._gathers_since = now
        return now - self._gathers_since < seconds

    def _hold_back(self, now: float) -> bool:
        """Whether the acks may wait although there is no backlog, for the next claim to take them along. That of a task that is just
        beginning would be on its way to the disk when its result comes, which would then wait for the disk twice."""
        return self._are_fresh(now, MOMENT) and self.ledger.has_only_acks(FEW) and not self._wants_claim(now)

    def _wants_claim(self, now: float) -> bool:
        return any(self._may_claim(channel, now) for channel in self._inboxes())

    def next_request(self, now: float) -> Request | None:
        """What the event loop is to ask for, with ``at_work`` held."""
        if self._careful or now < self._not_before:
            return None
        if self._hold_back(now):
            return None
        self._gathers_since = None
        settling = self.ledger.to_settle(now)
        channel, claim, _ = self._claim(now, bool(settling))
        if not settling and claim is None:
            return None
        return self._request(settling, [], channel, claim, now)

    def _request(
        self, settling: list[Delivery], renewing: list[Delivery], channel: Inbox | None, claim: ClaimRequest | None, now: float
    ) -> Request:  # fmt: skip
        settlements = [delivery.settlement for delivery in settling if delivery.settlement is not None]
        turn = Turn(settlements, [delivery.held for delivery in renewing], self.lease, claim)
        turn.prompt = channel is not None and not self.ledger.held_by(channel.key)
        return Request(turn, settling, renewing, channel, now)

    def _gather(self) -> None:
        """A moment brings more acks into this turn; a lone one is written at once."""
        ended = self.ledger.settling
        if ended and self._can_wait(ended):
            time.sleep(GATHER)

    def _can_wait(self, ended: int) -> bool:
        """There is more to claim, and each consumer has still most of its window to work on."""
        return all(
            self._backlog.get(channel.key) and ended < channel.window // 4 and self.ledger.held_by(channel.key)
            for channel in self._inboxes()
            if channel.queues() and not channel.brief
        )

    def _claims_at(self, channel: Inbox) -> float:
        """When to claim for the channel, if it wants something then."""
        return 0.0 if self._backlog.get(channel.key, True) else self._claim_at.get(channel.key, 0.0)

    def _may_claim(self, channel: Inbox, now: float) -> bool:
        return self._claims_at(channel) <= now and _wants(channel)

    def _claim(self, now: float, settling: bool) -> tuple[Inbox | None, ClaimRequest | None, bool]:
        """Channels take turns, and so do the queues of each."""
        self._turns += 1
        ready = [channel for channel in self._inboxes() if self._may_claim(channel, now)]
        if not ready:
            return None, None, False
        channel = ready[self._turns % len(ready)]
        queues = channel.queues()
        first = self._turns % len(queues)
        queues = queues[first:] + queues[:first]
        session = self._connection.session
        assert session is not None
        if self.dialect.probes and not settling:
            with self.database.errors():
                if not self.dialect.probe(session, queues):
                    self._nothing(channel.key, now)
                    return None, None, len(ready) > 1
        self._asked_at[channel.key] = now
        limit = min(channel.wanted(), MOST_CLAIMED)
        return channel, ClaimRequest(queues, limit, self.name, ids.new_token(), self.lease), len(ready) > 1

    def _exchange(self, request: Request) -> None:
        session = self._connection.session
        assert session is not None
        with self.database.errors():
            result = self.dialect.turn(session, request.turn)
        self.answered(request, result)

    def answered(self, request: Request, result: TurnResult) -> None:
        """With ``at_work`` held: notes what the database agreed to, and what it gave."""
        now, settling, channel, claim = request.at, request.settling, request.channel, request.turn.claim
        self._connection.worked()
        self.ledger.settled(settling, result.settled)
        self.ledger.renewed(request.renewing, result.renewed, now)
        if settling and not self.ledger.settling:
            with self._settled:
                self._settled.notify_all()
        if claim is None or channel is None:
            return
        rows = result.claimed
        taken = [self._take(row, channel.key, now, result.now) for row in rows]
        if claim.filled_by(len(rows)):
            self._backlog[channel.key] = True
        elif not result.whole:
            pause = MOMENT if request.turn.prompt else SWEEP_PAUSE
            self._backlog[channel.key], self._claim_at[channel.key] = False, now + pause
        elif self._express is not None and self._express.here:
            # How to fall asleep is asked on the listening connection, which is the station's thread's alone.
            self._backlog[channel.key], self._claim_at[channel.key] = False, NEVER
            self._dry.add(channel.key)
            self._wake.ring()
        else:
            self._nothing(channel.key, now)
        deliveries = [delivery for delivery in taken if delivery is not None]
        session = self._connection.session
        assert session is not None
        self._mark_revoked(session, deliveries, result.more[0] if result.more else None)
        self._claimed += [(channel, delivery) for delivery in deliveries]

    def _nothing(self, key: int, now: float) -> None:
        self._backlog[key] = False
        self._claim_at[key] = self._connection.claim_again_at(now)
        if self._claim_at[key] <= now:
            self._upkeep.soon()

    def _take(self, row: ClaimedRow, owner: int, sent: float, now: int | None) -> Delivery | None:
        """None: it cannot be delivered, and its end is noted."""
        delivery = self.ledger.add(row, owner, sent)
        delivery.revoked = row.target.startswith(NOTICE)
        if row.head is None:
            end = ends.no_message
        elif row.lapses >= MOST_LAPSES:
            end = ends.crashed_too_often
        elif row.expires_at is not None and now is not None and row.expires_at <= now:
            end = ends.expired
        else:
            return delivery
        self.ledger.settle(delivery.tag, end)
        return None

    def looks(self) -> list[tuple[str, dict[str, Any]]]:
        """What the event loop asks together with a turn, so that it need not wait for two more answers: what is revoked, and whether
        remote control was sent since."""
        return [routing.some_revoked(self.dialect, SOME_REVOKED), control_since(self.dialect, self._seen)]

    def _mark_revoked(
        self, session: Session, deliveries: list[Delivery], told: Sequence[Sequence[Any]] | None = None
    ) -> None:
        """A task may be revoked before its message is written: a retry is, or one whose id was known. Asked after the claim, so that no
        revoke that was there before the message is missed; ``told``: the answer, where it came with the claim."""
        task_ids = [delivery.row.task_id for delivery in deliveries if delivery.row.task_id is not None]
        if not task_ids:
            return
        if told is not None and len(told) < SOME_REVOKED:
            gone = {str(row[0]) for row in told}
        else:
            try:
                with self.database.errors():
                    gone = routing.revoked_among(self.dialect, session, task_ids)
            except BaseException:
                for delivery in deliveries:  # nobody knows whether they may run
                    self.ledger.settle(delivery.tag, ends.handed_back)
                raise
        for delivery in deliveries if gone else ():
            delivery.revoked = delivery.revoked or delivery.row.task_id in gone

    def _one_by_one(self, settling: list[Delivery], renewing: list[Delivery]) -> None:
        """After a refusal: every row on its own, so that a single bad one cannot stop the others."""
        for delivery in settling:
            try:
                self._exchange(self._request([delivery], [], None, None, time.monotonic()))
            except (ConnectionLost, DatabaseBusy):
                raise
            except QueueError:
                self.ledger.refused(delivery)
        for delivery in renewing:
            with contextlib.suppress(QueueError):
                self._exchange(self._request([], [delivery], None, None, time.monotonic()))
        self._careful = False

    def _read_mail(self, *, control: bool = False) -> list[tuple[Inbox, str, Item]]:
        """With ``control`` only the queues of remote control, and at once."""
        now, found = time.monotonic(), []
        if not control:
            if now < self._mail_at:
                return []
            listens = self._connection.sleeper is not None or self._elsewhere is not None
            self._mail_at = now + (max(self._poll, CLAIM_ANYWAY) if listens else self._poll)
        for channel in self._inboxes():
            for queue, bindings in channel.letters() if channel.wants_letters() else ():
                if control and not any(is_control(exchange) for exchange, _, _ in bindings):
                    continue
                letters = self.mail.read(queue, bindings, MOST_CLAIMED, rank_of, self._connection.session)
                found += [(channel, queue, letter) for letter in letters]
                if len(letters) >= MOST_CLAIMED:
                    self._mail_at = 0.0
        return found

    def _house(self) -> None:
        """What somebody has to do now and then: upkeep of the jobs, consumers' rows, queues that nobody uses any more."""
        session, now = self._connection.session, time.monotonic()
        assert session is not None
        if not self._needed():
            return
        with self.database.errors():
            if self._upkeep.run(session):
                for channel in self._inboxes():
                    # Somebody's queue has something. One that is for short-lived messages has, as a rule, none of it.
                    if not channel.brief or now >= self._asked_at.get(channel.key, 0.0) + self._poll:
                        self._backlog[channel.key] = True
        with self.database.errors():
            self._housekeeping.run(session, now)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _pause(self) -> float:
        now = time.monotonic()
        if not self._needed():
            return LINGER / 4 if not self._users or now - self._needed_at < LINGER else RESTING
        if self._connection.session is None:
            return max(0.0, min(self._connection.next_at - now, 1.0))
        express = self._express
        hold = now + GUARD if express is not None and express.drives(now) else now
        claims_at = min((self._claims_at(channel) for channel in self._inboxes() if _wants(channel)), default=NEVER)
        at = min(self._own_time(), max(hold, min(self.ledger.next_settle(), claims_at)))
        return max(0.0, at - now, self._not_before - now)

    def _wait(self, seconds: float) -> None:
        if seconds <= 0:
            return
        sleeper = self._connection.sleeper
        hungry = any(map(_wants, self._inboxes()))
        if not hungry:
            self._connection.wake()  # nobody needs to ring for jobs
            if sleeper is not None and sleeper.interval is not None and not self._letters_wanted():
                sleeper = None
        heard = False

        def wait() -> None:
            nonlocal heard
            heard = self._wake.wait(seconds, sleeper)

        self._sleeps_until = time.monotonic() + seconds
        self._connection.attempt(wait)
        self._sleeps_until = NEVER  # awake: it may have looked at everything already
        if heard:
            self._heard(None if sleeper is None else sleeper.rung())
            if self._express is not None:
                self._express.expect()

    def _letters_wanted(self) -> bool:
        return any(channel.letters() and channel.wants_letters() for channel in self._inboxes())


def _wants(channel: Inbox) -> bool:
    return channel.wanted() > 0 and bool(channel.queues())


def _put(claimed: list[tuple[Inbox, Delivery]]) -> None:
    for owner, group in groupby(claimed, key=itemgetter(0)):
        owner.put([delivery for _, delivery in group])


# -- one for each process and database ---------------------------------------------------------------------------------

_stations: dict[Options, Station] = {}
_stations_lock = threading.Lock()
_reached: set[Options] = set()
"""What a connection was made with once."""
_orphans: dict[Options, dict[str, str]] = {}
"""Consumers' rows that are to be removed: tag and queue."""
_of_parents: list[Any] = []
"""What a fork brought along: neither used nor collected here, since closing a parent's SQLite handle drops its locks."""


def enter(options: Options) -> Station:
    """The station of this process for these options; ``leave`` it when the connection is closed."""
    with _stations_lock:
        station = _stations.get(options)
        if station is None or station.pid != os.getpid():
            if station is not None:
                _of_parents.append(station)
            station = _stations[options] = Station(options)
        station._users += 1
        return station


def leave(station: Station) -> None:
    """Writes what was acked or given back; the last one lets the thread end when nothing is held any more."""
    if station.pid != os.getpid():
        return
    station.flush(CLOSE_PATIENCE)
    with _stations_lock:
        station._users -= 1
        if station._users == 0 and station._thread is None:
            _stations.pop(station.options, None)
            station._closed = True
            station._dispose()
            return
    station._wake.ring()


def _after_fork() -> None:
    global _stations_lock
    _stations_lock = threading.Lock()
    _of_parents.extend(_stations.values())
    _stations.clear()
    _orphans.clear()


def _at_exit() -> None:
    for station in list(_stations.values()):
        if station.pid == os.getpid():
            station.flush(CLOSE_PATIENCE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
