"""What this process holds: each delivered message from its claim until the database has agreed to its end.

One ledger per process and database, not per channel: after a reconnect running tasks go on, and ack through a channel that is
gone. No statement is sent here; ``station`` asks what to settle and to renew, and tells what the database answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from dbqueue.database.tables import IN_PLACE, ClaimedRow, Fact, Held, Settlement
from dbqueue.runtime.claims import BUSY_FIRST, BUSY_MOST
from dbqueue.states import Kind, State

REQUEUES_AT_ONCE = 2
"""A message that is put back more often in a row waits before it comes again, longer each time."""
LONGEST_WAIT = 60


@dataclass
class Delivery:
    """One message in our hands. Instants are of time.monotonic()."""

    tag: int
    row: ClaimedRow
    owner: int
    """The channel that it was claimed for."""
    renew_at: float
    lease_end: float
    delivered: bool = False
    settlement: Settlement | None = None
    settle_at: float = 0.0
    pause: float = 0.0
    lost: bool = False
    revoked: bool = False
    """Its task is not to run: who takes it only tells so."""

    @property
    def held(self) -> Held:
        return Held(self.row.id, self.row.token)


class Ledger:
    """Thread-safe."""

    def __init__(self, lease_us: int) -> None:
        self._lease = lease_us / 1e6
        self._lock = threading.Lock()
        self._open: dict[int, Delivery] = {}
        self._settling: dict[int, Delivery] = {}
        self._held: dict[int, int] = {}
        self._tags = count(1)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def settling(self) -> int:
        return len(self._settling)

    def has_only_acks(self, most: int) -> bool:
        """Whether what is to be written are acks, and not more than ``most``: nobody waits for them."""
        with self._lock:
            ended = self._settling.values()
            return len(ended) <= most and all(
                d.settlement is not None and d.settlement.state is State.ACKED for d in ended
            )

    def known(self) -> list[Held]:
        """Claims whose rows may rightly say that this process has them."""
        with self._lock:
            return [delivery.held for delivery in self._open.values()]

    def held_by(self, owner: int) -> int:
        """How many messages the channel has that it neither acked nor gave back."""
        return self._held.get(owner, 0)

    def next_tag(self) -> int:
        return next(self._tags)

    def add(self, row: ClaimedRow, owner: int, sent: float) -> Delivery:
        """``sent`` is before the database wrote the lease, so our idea of it ends early."""
        delivery = Delivery(next(self._tags), row, owner, sent + self._lease / 3, sent + self._lease)
        with self._lock:
            self._open[delivery.tag] = delivery
            self._held[owner] = self._held.get(owner, 0) + 1
        return delivery

    def of(self, owner: int) -> list[Delivery]:
        with self._lock:
            return [delivery for delivery in self._open.values() if delivery.owner == owner]

    def settle(self, tag: int, decide: Callable[[ClaimedRow], Settlement]) -> bool:
        """Notes the end of a message; it is written with the next turn, and the claim renewed until then. False: it has ended
        before, or is none of ours."""
        with self._lock:
            delivery = self._open.get(tag)
            if delivery is None or delivery.settlement is not None:
                return False
            self._held[delivery.owner] -= 1
            if delivery.revoked and decide in (acked, rejected):
                decide = revoked
            delivery.settlement = decide(delivery.row)
            if delivery.lost:
                del self._open[tag]
            else:
                self._settling[tag] = delivery
            return True

    def to_settle(self, now: float) -> list[Delivery]:
        if not self._settling:
            return []
        with self._lock:
            return [delivery for delivery in self._settling.values() if delivery.settle_at <= now]

    def to_renew(self, now: float) -> list[Delivery]:
        with self._lock:
            return [delivery for delivery in self._open.values() if delivery.renew_at <= now and not delivery.lost]

    def next_renewal(self) -> float:
        with self._lock:
            return min((d.renew_at for d in self._open.values() if not d.lost), default=float("inf"))

    def next_settle(self) -> float:
        with self._lock:
            return min((delivery.settle_at for delivery in self._settling.values()), default=float("inf"))

    def settled(self, deliveries: Sequence[Delivery], facts: Sequence[Fact]) -> None:
        now = time.monotonic()
        with self._lock:
            for delivery, fact in zip(deliveries, facts, strict=True):
                if fact is Fact.BUSY:
                    delivery.pause = min(max(BUSY_FIRST, delivery.pause * 2), BUSY_MOST)
                    delivery.settle_at = now + delivery.pause
                else:  # done, or somebody else's by now
                    self._settling.pop(delivery.tag, None)
                    self._open.pop(delivery.tag, None)

    def renewed(self, deliveries: Sequence[Delivery], facts: Sequence[Fact], sent: float) -> list[Delivery]:
        """Returns those that were lost: their row belongs to somebody else."""
        lost = []
        with self._lock:
            for delivery, fact in zip(deliveries, facts, strict=True):
                if fact is Fact.RENEWED:
                    delivery.renew_at, delivery.lease_end = sent + self._lease / 3, sent + self._lease
                elif fact is Fact.BUSY:
                    delivery.renew_at = time.monotonic() + min(0.05, self._lease / 20)
                else:
                    delivery.lost = True
                    lost.append(delivery)
                    if delivery.settlement is not None:
                        self._settling.pop(delivery.tag, None)
                        self._open.pop(delivery.tag, None)
        return lost

    def refused(self, delivery: Delivery) -> None:
        """The database does not take this one; asked again until its lease ends."""
        now = time.monotonic()
        with self._lock:
            delivery.settle_at = now + 1.0
            if now >= delivery.lease_end:
                self._settling.pop(delivery.tag, None)
                self._open.pop(delivery.tag, None)

    def overdue(self, now: float) -> bool:
        """Whether a lease must have ended because the database could not be reached: what was not started may run elsewhere."""
        with self._lock:
            return any(not delivery.lost and delivery.lease_end <= now for delivery in self._open.values())


# -- how a message ends ------------------------------------------------------------------------------------------------


def acked(row: ClaimedRow) -> Settlement:
    return Settlement(row.id, row.token, State.ACKED, row.queue)


def rejected(row: ClaimedRow) -> Settlement:
    return Settlement(row.id, row.token, State.DEAD, row.queue, Kind.REJECTED)


def expired(row: ClaimedRow) -> Settlement:
    return Settlement(row.id, row.token, State.CANCELLED, row.queue, Kind.EXPIRED)


def revoked(row: ClaimedRow) -> Settlement:
    """A notice has no task id, and its task's record has ended before."""
    if row.task_id is None:
        return acked(row)
    return Settlement(row.id, row.token, State.CANCELLED, row.queue, Kind.REVOKED)


def crashed_too_often(row: ClaimedRow) -> Settlement:
    return Settlement(row.id, row.token, State.DEAD, row.queue, Kind.CRASHED)


def no_message(row: ClaimedRow) -> Settlement:
    return Settlement(row.id, row.token, State.BLOCKED, row.queue, Kind.UNKNOWN_TARGET)


def handed_back(row: ClaimedRow) -> Settlement:
    """Nobody began with it: back in its place, and no attempt is counted."""
    return Settlement(row.id, row.token, State.PENDING, row.queue, delay=IN_PLACE, refund=True)


def left_by_close(row: ClaimedRow) -> Settlement:
    """A consumer had it when its channel was closed: back in its place, as redelivered."""
    return Settlement(row.id, row.token, State.PENDING, row.queue, delay=IN_PLACE)


def requeued(row: ClaimedRow, limit: int) -> Settlement:
    """Back in its place; from the third time on after a wait, or a message that nobody takes would keep everybody busy. Dead when it was
    put back ``limit`` times, if that is not 0. Deliveries whose lease was lost are not counted here, but in ``lapses``."""
    times = row.attempt - row.lapses
    if limit and times >= limit:
        return rejected(row)
    wait = 0 if times <= REQUEUES_AT_ONCE else min(2 ** min(times - REQUEUES_AT_ONCE, 10), LONGEST_WAIT)
    return Settlement(row.id, row.token, State.PENDING, row.queue, delay=wait * 1_000_000 or IN_PLACE)
