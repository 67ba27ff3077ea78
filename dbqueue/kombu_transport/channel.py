"""A channel: what it publishes is told in ``publishing``; here is what it consumes.

Messages arrive in the inbox, filled by the station's thread, and are delivered on the thread that drains.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbqueue import routing
from dbqueue.database.tables import ClaimedRow, Settlement
from dbqueue.errors import ConnectionLost, QueueError
from dbqueue.kombu_transport import ledger as ends
from dbqueue.kombu_transport import message as messages
from dbqueue.kombu_transport.housekeeping import ALIVE
from dbqueue.kombu_transport.ledger import Delivery
from dbqueue.kombu_transport.publishing import Publisher, check_queue
from dbqueue.mail import Binding, Item

if TYPE_CHECKING:
    from dbqueue.kombu_transport.transport import Transport

log = logging.getLogger("dbqueue.kombu")

UNLIMITED_PREFETCH = 32
"""Messages in the inbox of a channel without a prefetch limit."""


next_place = itertools.count().__next__
"""Numbers what arrives, over all channels of this process."""


@dataclass(frozen=True)
class Consumer:
    tag: str
    queue: str
    no_ack: bool
    callback: Callable[[Any], Any]
    bindings: tuple[Binding, ...]
    brief: bool


class Channel(Publisher):
    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.key = id(self)
        self.window = 0
        self.feeds_celery = False
        """What it delivered went to a Celery worker, which knows what it has begun."""
        self._by_tag: dict[str, Consumer] = {}
        self._queues: tuple[str, ...] = ()
        self.brief = False
        self._inbox: deque[tuple[int, str, Delivery | Item]] = deque()
        self._inbox_lock = threading.Lock()

    # -- consuming ---------------------------------------------------------------------------------------------------

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        check_queue(queue)
        dialect, station = self.station.dialect, self.station
        self._do(
            lambda s: routing.add_consumer(
                dialect, s, self._stored_tag(consumer_tag), queue, station.name, round(ALIVE * 1e6)
            ),
            write=True,
            joins=False,
        )
        self._by_tag[consumer_tag] = self._consumer(consumer_tag, queue, bool(no_ack), callback)
        self._note_queues()
        self._learn_stamps()
        self._consumers.add(consumer_tag)
        station.attach(self)

    def _learn_stamps(self) -> None:
        """A Celery worker knows from the start which stamps were revoked before it was there; it does the rest. Revoked ids it is
        told when a message with one comes."""
        state = sys.modules.get("celery.worker.state")
        if state is None or all(consumer.brief for consumer in self._by_tag.values()):
            return
        for stamp in self.station.read(lambda s: routing.revoked_stamps(self.station.dialect, s)):
            header, value = messages.stamp_of(stamp)
            known = state.revoked_stamps.get(header) or []
            known = known if isinstance(known, list) else [known]
            if value not in known:
                state.revoked_stamps[header] = [*known, value]

    def _consumer(self, tag: str, queue: str, no_ack: bool, callback: Any) -> Consumer:
        route = self.station.facts(queue)
        brief = route is not None and route.brief
        return Consumer(tag, queue, no_ack, callback, self._bindings(queue) if brief else (), brief)

    def _bound(self, queue: str) -> None:
        for consumer in list(self._by_tag.values()):
            if consumer.queue == queue:
                self._by_tag[consumer.tag] = self._consumer(consumer.tag, queue, consumer.no_ack, consumer.callback)

    def _stored_tag(self, tag: str) -> str:
        return f"{self.station.name}/{self.key}/{tag}"

    def basic_cancel(self, consumer_tag: str) -> None:
        consumer = self._by_tag.pop(consumer_tag, None)
        self._note_queues()
        self._consumers.discard(consumer_tag)
        if consumer is None:
            return
        if self._by_tag:
            self.station.news(self.key)
        else:
            self.station.detach(self)
        self._drop_from_inbox(consumer.queue)
        stored = self._stored_tag(consumer_tag)
        try:
            dialect = self.station.dialect
            if self.station.run(lambda s: routing.remove_consumer(dialect, s, stored, consumer.queue)):
                self.station.run(lambda s: routing.delete_queue(dialect, s, consumer.queue))
                self.station.mail.drop(consumer.queue)
                self.station.forget(consumer.queue)
        except ConnectionLost:
            self.station.orphan(stored, consumer.queue)

    def _drop_from_inbox(self, queue: str) -> None:
        if any(consumer.queue == queue for consumer in self._by_tag.values()):
            return
        with self._inbox_lock:
            gone = [entry for _, name, entry in self._inbox if name == queue]
            self._inbox = deque(arrived for arrived in self._inbox if arrived[1] != queue)
        for entry in gone:
            if isinstance(entry, Delivery):
                self._end(entry.tag, ends.handed_back)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        check_queue(queue)
        self._in_order()
        delivery = self.station.claim_one(queue, self.key)
        if delivery is not None:
            return self._message(delivery, no_ack)
        route = self.station.facts(queue)
        if route is not None and route.brief:
            letters = self.station.mail.read(queue, self._bindings(queue), 1)
            if letters:
                return self._letter(letters[0])
        return None

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        self.window = prefetch_count or 0
        self.qos.prefetch_count = self.window
        self.station.news(self.key)

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Never raises: the ledger keeps it until the database has it, or its lease has ended."""
        self._end(delivery_tag, ends.acked)

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        self._end(delivery_tag, self._requeued if requeue else ends.rejected)

    def basic_recover(self, requeue: bool = False) -> None:
        if not requeue:
            raise NotImplementedError("Does not support recover(requeue=False)")
        for delivery in self.station.ledger.of(self.key):
            if delivery.delivered:
                self._end(delivery.tag, self._requeued)

    def _requeued(self, row: ClaimedRow) -> Settlement:
        return ends.requeued(row, self.station.options.delivery_limit)

    def _end(self, tag: int, how: Any) -> None:
        if self.station.ledger.settle(tag, how):
            self.station.wake()

    def _restore(self, message: Any) -> None:
        self.basic_reject(message.delivery_tag, requeue=True)

    # -- the station's side: called on its thread ----------------------------------------------------------------------

    def wanted(self) -> int:
        transport = self.connection
        if self.closed or transport is None or not transport.draining:
            return 0
        waiting = len(self._inbox)
        if not self.window:
            return max(0, UNLIMITED_PREFETCH - waiting)
        held = self.station.ledger.held_by(self.key)
        return max(0, self.window - held)

    def queues(self) -> tuple[str, ...]:
        return self._queues

    def _note_queues(self) -> None:
        self._queues = tuple(dict.fromkeys(consumer.queue for consumer in self._by_tag.values()))
        self.brief = all(consumer.brief for consumer in self._by_tag.values())

    def wants_letters(self) -> bool:
        transport = self.connection
        return transport is not None and transport.draining and len(self._inbox) <= 10 * UNLIMITED_PREFETCH

    def letters(self) -> list[tuple[str, tuple[Binding, ...]]]:
        return [(consumer.queue, consumer.bindings) for consumer in list(self._by_tag.values()) if consumer.brief]

    def put(self, deliveries: list[Delivery]) -> None:
        self._arrived([(delivery.row.queue, delivery) for delivery in deliveries])

    def put_letters(self, queue: str, letters: list[Item]) -> None:
        self._arrived([(queue, letter) for letter in letters])

    def _arrived(self, entries: list[tuple[str, Any]]) -> None:
        transport = self.connection
        with self._inbox_lock:
            open_now = not self.closed and transport is not None
            if open_now:
                self._inbox.extend((next_place(), queue, entry) for queue, entry in entries)
        if not open_now:
            for _, entry in entries:
                if isinstance(entry, Delivery):
                    self._end(entry.tag, ends.handed_back)
            return
        transport.arrived()

    def trouble(self, error: ConnectionLost | None) -> None:
        transport = self.connection
        if transport is not None:
            transport.trouble(error)

    # -- delivering: on the thread that drains -----------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._inbox)

    @property
    def place(self) -> float:
        """Of its oldest entry among all that this process was sent; infinite: it has none."""
        with self._inbox_lock:
            return self._inbox[0][0] if self._inbox else math.inf

    def deliver(self) -> int:
        """Hands over what arrived first; returns how many messages that were."""
        with self._inbox_lock:
            if not self._inbox:
                return 0
            _, queue, entry = self._inbox.popleft()
        consumer = next((c for c in self._by_tag.values() if c.queue == queue), None)
        if consumer is None or (isinstance(entry, Delivery) and entry.lost):
            if isinstance(entry, Delivery):
                self._end(entry.tag, ends.handed_back)
            return 0
        celerys = _is_celerys(consumer.callback)
        self.feeds_celery = self.feeds_celery or celerys
        if isinstance(entry, Delivery) and entry.revoked:
            if not celerys:
                self._end(entry.tag, ends.acked)
                return 0
            _tell_revoked(entry)
        made = self._message(entry, consumer.no_ack) if isinstance(entry, Delivery) else self._letter(entry)
        if made is not None:
            self._hand_over(consumer, entry, made)
        return 1

    def _hand_over(self, consumer: Consumer, entry: Delivery | Item, made: Any) -> None:
        """What a Celery worker stumbles over (a body of another shape, say) would end it, be handed back, and end the next one: such a
        message is kept as dead, and the worker goes on. Of everybody else, errors are their own affair."""
        try:
            consumer.callback(made)
        except Exception as error:
            if not _is_celerys(consumer.callback) or isinstance(error, (*self._errors, QueueError, MemoryError)):
                raise
            if isinstance(entry, Delivery):
                log.error("Celery cannot take message %s (%s); it is kept as dead", entry.row.id.hex(), _name(error))
                self._end(entry.tag, ends.rejected)
            else:
                log.error("Celery cannot take a short-lived message (%s)", _name(error))

    @property
    def _errors(self) -> tuple[type[BaseException], ...]:
        """By which kombu knows that the connection is lost, or a channel."""
        transport = self.connection
        return () if transport is None else (*transport.connection_errors, *transport.channel_errors)

    def _message(self, delivery: Delivery, no_ack: bool) -> Any:
        row = delivery.row
        assert row.head is not None
        try:
            payload = messages.payload_of(
                row.head, row.payload, delivery.tag, redelivered=row.attempt > 1 or row.lapses > 0
            )
            made = self.Message(payload, channel=self)
        except (ValueError, KeyError, TypeError):
            log.exception("message %s cannot be read; it is kept as dead", row.id.hex())
            self._end(delivery.tag, ends.rejected)
            return None
        delivery.delivered = True
        if no_ack:
            self._end(delivery.tag, ends.acked)
        return made

    def _letter(self, letter: Item) -> Any:
        try:
            payload = messages.payload_of(
                letter.head, letter.payload, self.station.ledger.next_tag(), redelivered=False
            )
            return self.Message(payload, channel=self)
        except (ValueError, KeyError, TypeError):
            log.exception("a short-lived message cannot be read")
            return None

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back what was not started. Running tasks stay in the ledger and ack through this dead channel."""
        if self.closed:
            return
        with self._inbox_lock:
            self.closed = True
        for tag in list(self._by_tag):
            self.basic_cancel(tag)
        self.station.detach(self)
        self._give_back()
        with self._inbox_lock:
            self._inbox.clear()
        if self.connection is not None:
            self.connection.close_channel(self)
        self.exchange_types = None

    def _give_back(self) -> None:
        running = _running_tasks() if self.feeds_celery else None
        for delivery in self.station.ledger.of(self.key):
            if delivery.settlement is not None:
                continue
            if running is None:
                self._end(delivery.tag, ends.left_by_close if delivery.delivered else ends.handed_back)
            elif delivery.row.task_id is None or delivery.row.task_id not in running:
                self._end(delivery.tag, ends.handed_back)


def _name(error: BaseException) -> str:
    return type(error).__name__


def _is_celerys(callback: Any) -> bool:
    handler = getattr(getattr(callback, "__self__", None), "on_message", None)
    return str(getattr(handler, "__module__", "")).startswith("celery.worker.")


def _tell_revoked(delivery: Delivery) -> None:
    """A Celery worker ends a task that it knows as revoked as such: result, chord, event."""
    assert delivery.row.head is not None
    task_id = delivery.row.task_id or messages.task_id_of(delivery.row.head)
    if task_id is not None:
        sys.modules["celery.worker.state"].revoked.add(task_id)


def _running_tasks() -> set[str]:
    """Ids of the tasks that this Celery worker has begun."""
    state = sys.modules.get("celery.worker.state")
    return set() if state is None else {request.id for request in tuple(state.active_requests)}


def tasks_begun() -> int:
    """How many tasks this Celery worker has begun so far."""
    state = sys.modules.get("celery.worker.state")
    return 0 if state is None else int(state.all_total_count[0])
