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
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from dbqueue import ids, routing
from dbqueue.database import joined
from dbqueue.database.alive import Alive
from dbqueue.database.dialect import Session
from dbqueue.database.engine import Database, denial
from dbqueue.database.tables import ClaimedRow, ClaimRequest, NewJob, Turn
from dbqueue.errors import ConfigError, ConnectionLost, DatabaseBusy, QueueError
from dbqueue.kombu_transport import ledger as ends
from dbqueue.kombu_transport.housekeeping import Housekeeping
from dbqueue.kombu_transport.ledger import Delivery, Ledger
from dbqueue.kombu_transport.message import NOTICE, id_of, is_control, rank_of
from dbqueue.kombu_transport.options import Options
from dbqueue.mail import Binding, Item, Mail, bells
from dbqueue.queue import open_database
from dbqueue.routing import Route
from dbqueue.runtime.connection import CLAIM_ANYWAY, SWEEP_PAUSE, Connection
from dbqueue.runtime.upkeep import Upkeep
from dbqueue.runtime.wake import Wake

log = logging.getLogger("dbqueue.kombu")

T = TypeVar("T")

FACTS_FOR = 10.0
"""Seconds for which what was declared about a queue is remembered."""
GATHER = 0.001
MOST_CLAIMED = 64
MOST_LAPSES = 20
"""Leases lost in the hands of consumers, after which a message is dead: it kills whoever takes it."""
LINGER = 2.0
"""Seconds that the thread stays after the last connection was closed and nothing is held any more."""
CLOSE_PATIENCE = 5.0


class Inbox(Protocol):
    """A channel, as the station's thread sees it."""

    key: int
    window: int
    """How many messages it may have in its hands; 0: any number."""

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


class Station:
    def __init__(self, options: Options) -> None:
        self.options = options
        settings = options.settings
        self.database: Database = open_database(settings)
        self.dialect = self.database.dialect
        self.mail = Mail(self.database)
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
        self._mail_at = 0.0
        self._changed = True
        self._housekeeping = Housekeeping(self.database, self.mail, self.name)
        self._not_before = 0.0
        self._careful = False
        self._told = False
        self._complaint = ""
        self._settled = threading.Condition()

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

    def write(self, jobs: list[NewJob]) -> None:
        """Enqueues in one transaction of its own. An answer that was lost with the connection is looked up, the ids being ours."""
        self._ready()

        def verb(session: Session, new: list[NewJob]) -> None:
            for job in new:
                self.dialect.enqueue(session, job)

        single = len(jobs) == 1 and self.dialect.name != "sqlite"
        run = self.database.single if single else self.database.run
        try:
            run(lambda session: verb(session, jobs))
        except ConnectionLost:
            missing = self.database.read(lambda s: [job for job in jobs if not self.dialect.exists(s, job.id)])
            if missing:
                run(lambda session: verb(session, missing))

    def claim_one(self, queue: str, owner: int) -> Delivery | None:
        """For basic_get. What cannot be delivered is settled here and the next one taken."""
        self.database.ready()
        for _ in range(1_000):
            with self.database.session() as session:
                sent = time.monotonic()
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
                if delivery is not None:
                    self._mark_revoked(session, [delivery])
                    if not delivery.revoked:
                        return delivery
                    self.ledger.settle(delivery.tag, ends.acked)
        return None

    def attach(self, inbox: Inbox) -> None:
        """From now on the thread claims and reads for this channel."""
        with self._lock:
            self._channels[inbox.key] = inbox
        self.news(inbox.key)

    def detach(self, inbox: Inbox) -> None:
        with self._lock:
            self._channels.pop(inbox.key, None)
            self._backlog.pop(inbox.key, None)
            self._claim_at.pop(inbox.key, None)
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
                self.wake()
                self._settled.wait(min(left, 0.5))
        return not self.ledger.settling

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._finished():
                self._wait(self._step())
        except Exception:
            log.exception("dbqueue's thread for %s ended", self.database.label)
        finally:
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
        self.mail.close()
        self.database.close()
        if self._alive is not None:
            self._alive.close()
        self._wake.close()

    def _step(self) -> float:
        """Everything that is due now; returns the seconds until something else is."""
        now = time.monotonic()
        if now < self._not_before:
            return self._not_before - now
        try:
            if self._connection.ready(self.ledger.known):
                self._listen()
                more = self._round()
                self._house()
                self._told, self._complaint = False, ""
                if more:
                    return 0.0
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
        return self._pause()

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
        self._connection.listen_to(tuple(names))

    def _heard(self) -> None:
        for channel in self._inboxes():
            self._backlog[channel.key] = True
        self._mail_at = 0.0
        self._upkeep.soon()

    def _round(self) -> bool:
        """A turn, and the letters; handed over in the order in which one process has published them: a revoke goes before a task that
        was sent after it, and a question after a task that was sent before it. Returns whether there is more to do at once."""
        self._letters += self._read_mail()
        asked = any(is_control(letter.exchange) for _, _, letter in self._letters)
        if asked:  # what was published before it is there now
            for channel in self._inboxes():
                self._backlog[channel.key] = True
        try:
            more = self._turn()
            for _ in self._inboxes() if asked else ():
                more = more and self._turn()  # every channel's
        finally:
            self._hand_over()
        return more or bool(self._letters)

    def _hand_over(self) -> None:
        jobs, self._claimed = self._claimed, []
        letters, self._letters = self._letters, []
        try:
            if jobs:  # of what was written between the look at the letters and the claim, some may be older than a job of the claim
                youngest = max(delivery.row.id for _, delivery in jobs)
                late = self._read_mail(control=True)
                letters += [item for item in late if id_of(item[2]) < youngest]
                self._letters = [item for item in late if id_of(item[2]) >= youngest]
        finally:  # a look that failed keeps nobody waiting
            ages = [(id_of(letter), channel, queue, letter) for channel, queue, letter in letters]
            for owner, delivery in jobs:
                older = [entry for entry in ages if entry[0] < delivery.row.id]
                ages = [entry for entry in ages if entry[0] >= delivery.row.id]
                for _, channel, queue, letter in older:
                    channel.put_letters(queue, [letter])
                owner.put([delivery])
            for _, channel, queue, letter in ages:
                channel.put_letters(queue, [letter])

    def _turn(self) -> bool:
        """Settle, renew, claim for one channel. Returns whether there is more to do at once."""
        self._gather()
        now = time.monotonic()
        settling, renewing = self.ledger.to_settle(now), self.ledger.to_renew(now)
        if self._careful:
            self._one_by_one(settling, renewing)
            return False
        channel, claim, more = self._claim(now, bool(settling))
        if settling or renewing or claim is not None:
            self._exchange(settling, renewing, channel, claim, now)
        return more

    def _gather(self) -> None:
        """While there is more to claim and a consumer has still half of its window to work on, a moment brings more acks into this
        turn; a lone one is written at once."""
        ended = self.ledger.settling
        if ended and all(
            self._backlog.get(channel.key) and ended < channel.window // 2
            for channel in self._inboxes()
            if channel.queues()
        ):
            time.sleep(GATHER)

    def _claim(self, now: float, settling: bool) -> tuple[Inbox | None, ClaimRequest | None, bool]:
        """Channels take turns, and so do the queues of each."""
        channels = self._inboxes()
        self._turns += 1
        ready = []
        for channel in channels:
            due = self._backlog.get(channel.key, True) or now >= self._claim_at.get(channel.key, 0.0)
            if due and channel.wanted() > 0 and channel.queues():
                ready.append(channel)
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
                    self._nothing(channel, now, whole=True)
                    return None, None, len(ready) > 1
        limit = min(channel.wanted(), MOST_CLAIMED)
        return channel, ClaimRequest(queues, limit, self.name, ids.new_token(), self.lease), len(ready) > 1

    def _exchange(
        self,
        settling: list[Delivery],
        renewing: list[Delivery],
        channel: Inbox | None,
        claim: ClaimRequest | None,
        now: float,
    ) -> None:
        session = self._connection.session
        assert session is not None
        settlements = [delivery.settlement for delivery in settling if delivery.settlement is not None]
        turn = Turn(settlements, [delivery.held for delivery in renewing], self.lease, claim)
        with self.database.errors():
            result = self.dialect.turn(session, turn)
        self._connection.worked()
        self.ledger.settled(settling, result.settled)
        self.ledger.renewed(renewing, result.renewed, now)
        if settling and not self.ledger.settling:
            with self._settled:
                self._settled.notify_all()
        if claim is None or channel is None:
            return
        rows = result.claimed
        taken = [self._take(row, channel.key, now, result.now) for row in rows]
        if claim.filled_by(len(rows)):
            self._backlog[channel.key] = True
        else:
            self._nothing(channel, now, whole=result.whole)
        deliveries = [delivery for delivery in taken if delivery is not None]
        self._mark_revoked(session, deliveries)
        self._claimed += [(channel, delivery) for delivery in deliveries]

    def _nothing(self, channel: Inbox, now: float, *, whole: bool) -> None:
        self._backlog[channel.key] = False
        if not whole:
            self._claim_at[channel.key] = now + SWEEP_PAUSE
            return
        self._claim_at[channel.key] = self._connection.claim_again_at(now)
        if self._claim_at[channel.key] <= now:
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

    def _mark_revoked(self, session: Session, deliveries: list[Delivery]) -> None:
        """A task may be revoked before its message is written: a retry is, or one whose id was known. Asked after the claim, so that no
        revoke that was there before the message is missed."""
        task_ids = [delivery.row.task_id for delivery in deliveries if delivery.row.task_id is not None]
        if not task_ids:
            return
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
                self._exchange([delivery], [], None, None, time.monotonic())
            except (ConnectionLost, DatabaseBusy):
                raise
            except QueueError:
                self.ledger.refused(delivery)
        for delivery in renewing:
            with contextlib.suppress(QueueError):
                self._exchange([], [delivery], None, None, time.monotonic())
        self._careful = False

    def _read_mail(self, *, control: bool = False) -> list[tuple[Inbox, str, Item]]:
        """With ``control`` only the queues of remote control, and at once."""
        now, found = time.monotonic(), []
        if not control:
            if now < self._mail_at:
                return []
            self._mail_at = now + (
                max(self._poll, CLAIM_ANYWAY) if self._connection.sleeper is not None else self._poll
            )
        for channel in self._inboxes():
            for queue, bindings in channel.letters() if channel.wants_letters() else ():
                if control and not any(is_control(exchange) for exchange, _, _ in bindings):
                    continue
                letters = self.mail.read(queue, bindings, MOST_CLAIMED, rank_of)
                found += [(channel, queue, letter) for letter in letters]
                if len(letters) >= MOST_CLAIMED:
                    self._mail_at = 0.0
        return found

    def _house(self) -> None:
        """What somebody has to do now and then: upkeep of the jobs, consumers' rows, queues that nobody uses any more."""
        session, now = self._connection.session, time.monotonic()
        assert session is not None
        if not self._channels and not len(self.ledger):
            return
        with self.database.errors():
            if self._upkeep.run(session):
                for channel in self._inboxes():
                    self._backlog[channel.key] = True
        with self.database.errors():
            self._housekeeping.run(session, now)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _pause(self) -> float:
        now = time.monotonic()
        if self._connection.session is None:
            return max(0.0, min(self._connection.next_at - now, 1.0))
        times = [self._connection.next_at, self.ledger.next_at()]
        if not self._users and not len(self.ledger):
            times.append(now + LINGER / 4)
        if self._channels or len(self.ledger):
            times += [self._upkeep.next_at, self._housekeeping.next_at]
        for channel in self._inboxes():
            if channel.letters() and channel.wants_letters():
                times.append(self._mail_at)
            if channel.queues() and channel.wanted() > 0:
                at = self._claim_at.get(channel.key, 0.0)
                times.append(now if self._backlog.get(channel.key, True) else at)
        return max(0.0, min(times) - now, self._not_before - now)

    def _wait(self, seconds: float) -> None:
        if seconds <= 0:
            return
        sleeper = self._connection.sleeper
        hungry = any(channel.wanted() > 0 and channel.queues() for channel in self._inboxes())
        if not hungry:
            self._connection.wake()  # nobody needs to ring for jobs
            if sleeper is not None and sleeper.interval is not None and not self._letters_wanted():
                sleeper = None
        heard = False

        def wait() -> None:
            nonlocal heard
            heard = self._wake.wait(seconds, sleeper)

        self._connection.attempt(wait)
        if heard:
            self._heard()

    def _letters_wanted(self) -> bool:
        return any(channel.letters() and channel.wants_letters() for channel in self._inboxes())


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
