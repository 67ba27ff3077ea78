"""The half of a channel that speaks: exchanges, queues and bindings are declared, messages published.

What is published joins the caller's transaction inside ``dbqueue.using(...)``, declarations included, so that both commit or
neither; remote control, events and replies never do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from amqp.exceptions import ChannelError
from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.exchange import STANDARD_EXCHANGE_TYPES
from kombu.utils.json import dumps
from kombu.utils.uuid import uuid

from dbqueue import ids, routing
from dbqueue.database import joined
from dbqueue.database.dialect import Session
from dbqueue.database.tables import Letter, NewJob
from dbqueue.errors import ConnectionLost, DatabaseError, EnqueueFailed, ReservedName, Unroutable
from dbqueue.kombu_transport import groups
from dbqueue.kombu_transport import message as messages
from dbqueue.kombu_transport import options as configuration
from dbqueue.kombu_transport.message import Revoke
from dbqueue.kombu_transport.station import Station
from dbqueue.mail import Binding, bells
from dbqueue.routing import Exchange, Queue, Route
from dbqueue.settings import RESERVED_PREFIX

if TYPE_CHECKING:
    from dbqueue.kombu_transport.transport import Transport

T = TypeVar("T")

IN_ORDER_PATIENCE = 1.0
COUNTED = 1_000
"""A declaration that is not passive, as each producer makes it, counts no further, and only what is ready: its caller does not look."""
REVOKED_FOR = 3 * 3_600.0
"""Seconds for which a revoked task is remembered: as long as Celery's workers do."""
HEADS_AT_ONCE = 1_000
REVOKED_AT_ONCE = 500
"""Tasks that one transaction of a revoke remembers and cancels at most: on SQLite it holds up every writer."""
LETTER_LIFE = 300.0
"""Seconds that a short-lived message is kept at most."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _joins(method: Method) -> Method:
    """With the option ``join`` it runs as inside of ``using`` where Django's transaction is open."""

    @functools.wraps(method)
    def joining(self: Publisher, *args: Any, **kwargs: Any) -> Any:
        name = self.station.options.join
        if name is None:
            return method(self, *args, **kwargs)
        with joined.joining(name):
            return method(self, *args, **kwargs)

    return joining  # type: ignore[return-value]


class Publisher(virtual.Channel):
    supports_fanout = True
    exchange_types: Any = dict(STANDARD_EXCHANGE_TYPES)  # noqa: RUF012 - each channel makes its own in its place
    from_transport_options: tuple[str, ...] = ()

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.closed: bool = False
        self._station: Station = connection.station

    @property
    def station(self) -> Station:
        """Also of a closed channel: running tasks ack through it."""
        if self._station.pid != os.getpid():
            raise ConnectionLost("this channel belongs to the process that this one was forked from")
        return self._station

    # -- whose transaction -------------------------------------------------------------------------------------------

    def _do(self, verb: Callable[[Session], T], *, write: bool, joins: bool = True) -> T:
        """In the caller's transaction inside ``using``, else in one of our own. What is not durable does not join: others must see
        it before the caller commits, the queue of a reply for one."""
        block = joined.current()
        joins = joins or (block is not None and block.buffer is not None and block.buffer.holds_lock)
        if block is None or not joins or (not write and block.closed):
            if block is not None and write:
                block.notice(self.station.database)
            return self.station.run(verb) if write else self.station.read(verb)
        database = self.station.database
        block.check(database)
        if block.buffer is not None:  # an async session is written to by its own commit only
            if not write:
                return self.station.read(verb)
            block.buffer.defer(database, verb)
            block.at_end(self._forget_declared)
            return None  # type: ignore[return-value]  # of writes, nobody asks
        with joined.failures(database):
            session = block.session(database)
            if not write:
                routing.take_lock(self.station.dialect, session)
            block.at_end(self._forget_declared)
            return verb(session)

    def _forget_declared(self) -> None:
        """A declaration that is rolled back must not stay in kombu's cache, or later messages vanish."""
        transport = self.connection
        if transport is not None and transport.client is not None:
            transport.client.declared_entities.clear()

    # -- declaring ---------------------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    @_joins
    def exchange_declare(
        self, exchange: str | None = None, type: str = "direct", durable: bool = False, auto_delete: bool = False,
        arguments: Any = None, nowait: bool = False, passive: bool = False,
    ) -> None:  # fmt: skip
        kind = type or "direct"
        name = exchange or f"amq.{kind}"
        dialect = self.station.dialect
        joins = bool(durable)
        found = self._do(lambda s: routing.find_exchange(dialect, s, name), write=False, joins=joins)
        if found is None:
            if passive:
                raise self._not_found("exchange", name, "Channel.exchange_declare")
            if kind not in self.exchange_types:
                raise ChannelError(
                    f"COMMAND_INVALID - unknown exchange type {kind!r}", (40, 10), "Channel.exchange_declare", 503
                )
            declared = Exchange(name, kind, bool(durable), bool(auto_delete), dumps(arguments or {}))
            self._do(lambda s: routing.declare_exchange(dialect, s, declared), write=True, joins=joins)
        elif not passive and found.type != kind:
            raise ChannelError(
                f"PRECONDITION_FAILED - exchange {name!r} is of type {found.type}, not {kind}", (40, 10), "Channel.exchange_declare",
                406,
            )  # fmt: skip

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        dialect = self.station.dialect
        self._do(lambda s: routing.delete_exchange(dialect, s, exchange, if_unused=bool(if_unused)), write=True)

    @_joins
    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        name = queue or f"amq.gen-{uuid()}"
        check_queue(name)
        dialect, station = self.station.dialect, self.station
        declared = self._declared(name, kwargs)
        configuration.tell_unmet(declared.name, kwargs.get("arguments") or {})
        # A reply's queue must be seen before the caller commits, except on SQLite, where the caller holds the one write lock, and the
        # request is not seen before that either.
        joins = not declared.brief or dialect.probes
        known = self._do(lambda s: routing.find_queue(dialect, s, name), write=False, joins=joins)
        if known is None:
            if passive:
                raise self._not_found("queue", name, "Channel.queue_declare")
            self._do(lambda s: routing.declare_queue(dialect, s, declared), write=True, joins=joins)
            known = Route(name, declared.message_ttl_ms, declared.brief, declared.durable)
            if declared.brief:
                station.mail.open(name)
        elif known.brief and not passive and joined.current() is None:
            station.run(lambda s: routing.touch_queue(dialect, s, name))
        station.learn(name, known)
        if kwargs.get("nowait") or (joined.current() is not None and not passive):
            return queue_declare_ok_t(name, 0, 0)
        if passive:
            return queue_declare_ok_t(name, self._size(name), self._consumer_count(name))
        return queue_declare_ok_t(name, self._size(name, COUNTED), self._consumer_count(name))

    @staticmethod
    def _declared(name: str, options: dict[str, Any]) -> Queue:
        arguments = options.get("arguments") or {}
        return Queue(
            name, bool(options.get("durable", True)), bool(options.get("auto_delete")), bool(options.get("exclusive")),
            arguments.get("x-expires"), arguments.get("x-message-ttl"), dumps(arguments),
        )  # fmt: skip

    def _not_found(self, what: str, name: str, method: str) -> ChannelError:
        return ChannelError(f"NOT_FOUND - no {what} {name!r}", (50, 10), method, 404)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self._do(lambda s: routing.find_queue(self.station.dialect, s, queue), write=False) is not None

    def _consumer_count(self, queue: str) -> int:
        return self._do(lambda s: routing.consumer_count(self.station.dialect, s, queue), write=False)

    @_joins
    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        check_queue(queue)
        if not exchange:  # every queue is bound to the default exchange by its name
            return
        dialect = self.station.dialect
        key = routing_key or ""
        route = self.station.facts(queue)
        joins = route is None or not route.brief
        if not self._do(lambda s: routing.is_bound(dialect, s, exchange, queue, key), write=False, joins=joins):
            self._do(lambda s: routing.bind(dialect, s, exchange, queue, key), write=True, joins=joins)
        self._bound(queue)

    def _bound(self, queue: str) -> None:
        """The queue has another binding now."""

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        if exchange:
            dialect = self.station.dialect
            self._do(lambda s: routing.unbind(dialect, s, exchange, queue, routing_key or ""), write=True)

    def list_bindings(self) -> list[tuple[str, str, str]]:
        return self._do(lambda s: routing.all_bindings(self.station.dialect, s), write=False)

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        return [(key, key, queue) for queue, name, key in self.list_bindings() if name == exchange]

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> int:
        check_queue(queue)
        if (if_empty and self._size(queue)) or (if_unused and self._consumer_count(queue)):
            return 0
        dialect, station = self.station.dialect, self.station
        if joined.current() is None:
            gone = routing.delete_in_steps(dialect, station.run, queue, station.facts(queue))
        else:
            gone = self._do(lambda s: routing.delete_queue(dialect, s, queue), write=True)
        station.mail.drop(queue)
        station.forget(queue)
        return gone

    def queue_purge(self, queue: str, **kwargs: Any) -> int:
        check_queue(queue)
        self._in_order()
        dialect = self.station.dialect
        if joined.current() is None:
            purged = routing.purge_in_steps(dialect, self.station.run, queue)
        else:
            purged = self._do(lambda s: routing.purge(dialect, s, queue), write=True)
        route = self.station.facts(queue)
        if route is not None and route.brief:
            purged += self.station.mail.purge(queue, self._bindings(queue))
        return purged

    def _in_order(self) -> None:
        """What this process gave back is there before it looks, and what this thread has published."""
        groups.flush()
        if self.station.ledger.settling:
            self.station.flush(IN_ORDER_PATIENCE)

    def _size(self, queue: str, most: int | None = None) -> int:
        self._in_order()
        dialect = self.station.dialect
        waiting = self._do(
            lambda s: routing.size(dialect, s, queue) if most is None else routing.ready(dialect, s, queue, most),
            write=False,
        )
        route = self.station.facts(queue)
        if route is not None and route.brief:
            waiting += self.station.mail.size(queue, self._bindings(queue))
        return waiting

    def _bindings(self, queue: str) -> tuple[Binding, ...]:
        return tuple(self.station.read(lambda s: routing.bindings_of(self.station.dialect, s, queue)))

    # -- publishing --------------------------------------------------------------------------------------------------

    @_joins
    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        if not exchange:
            check_queue(routing_key)
        block = joined.current()
        if block is None or self._is_brief(message, exchange, routing_key, block):
            self._publish(message, exchange or "", routing_key or "", None)
            return
        try:
            self._publish(message, exchange or "", routing_key or "", block)
        except DatabaseError as error:  # none that kombu knows and would try again
            raise EnqueueFailed(
                f"the message was not written ({type(error).__name__}): dbqueue could not look up where it goes. Roll back"
            ) from error

    def _is_brief(self, message: dict[str, Any], exchange: str, routing_key: str, block: joined.Block) -> bool:
        """Remote control, events and replies: they do not join a caller's transaction. A transient message to an ordinary queue is
        none of them."""
        dialect, transient = self.station.dialect, messages.is_transient(message)
        if not exchange:
            route = self.station.facts(routing_key)
            return transient if route is None else route.takes_letter(transient=transient)
        found = self.station.read(lambda s: routing.find_exchange(dialect, s, exchange))
        if found is not None and not found.durable and not block.gathers:
            return True
        if not transient:
            return False
        routes = self.station.read(lambda s: routing.routes(dialect, s, exchange, routing_key))
        return all(route.takes_letter(transient=True) for route in routes)

    def _publish(self, message: dict[str, Any], exchange: str, routing_key: str, block: joined.Block | None) -> None:
        if block is not None:  # kombu has noted by now what was declared for it
            block.at_end(self._forget_declared)
        transient = messages.is_transient(message)
        if not exchange:
            route = self.station.facts(routing_key)
            found = [route or Route(routing_key)] if route is not None or not transient else []
        else:
            found = self._do(
                lambda s: routing.routes(self.station.dialect, s, exchange, routing_key),
                write=False,
                joins=block is not None,
            )
        if not found and block is not None:
            if block.buffer is None:
                raise _unroutable(exchange)
            self._send_at_commit(message, exchange, routing_key, block)  # the binding may wait for the commit as well
            return
        self._send(message, exchange, routing_key, found, transient=transient, block=block)

    def _send_at_commit(self, message: dict[str, Any], exchange: str, routing_key: str, block: joined.Block) -> None:
        dialect, database = self.station.dialect, self.station.database
        block.check(database)
        assert block.buffer is not None

        def verb(session: Session) -> None:
            found = routing.routes(dialect, session, exchange, routing_key)
            if not found:
                raise _unroutable(exchange)
            for job in self._jobs(message, exchange, routing_key, found):
                dialect.enqueue(session, job, database.database_id)

        block.buffer.defer(database, verb)

    def _jobs(self, message: dict[str, Any], exchange: str, routing_key: str, found: list[Route]) -> list[NewJob]:
        head, body, options = (
            messages.head_of(message, exchange, routing_key),
            messages.body_of(message),
            self.station.options,
        )
        return [
            messages.job_of(
                message, route.queue, head, body, queue_ttl_ms=route.message_ttl_ms, eta_lead=options.eta_lead,
                redis=options.redis_priorities,
            )
            for route in found
        ]  # fmt: skip

    def _send(
        self, message: dict[str, Any], exchange: str, routing_key: str, found: list[Route], *, transient: bool,
        block: joined.Block | None,
    ) -> None:  # fmt: skip
        if messages.is_control(exchange) and (revoke := messages.revoked_by(message)):
            groups.flush()
            self._revoke(revoke)
        body = messages.body_of(message)
        brief = [route for route in found if route.takes_letter(transient=transient)]
        jobs = self._jobs(message, exchange, routing_key, [route for route in found if route not in brief])
        if jobs and block is not None:
            self._join(block, jobs)
        elif jobs:
            self._write(jobs)
        if brief:
            groups.flush()
            ttls = [ttl for ttl in (messages.ttl_us(message), *(_us(route) for route in brief)) if ttl is not None]
            ttl = min([*ttls, round(LETTER_LIFE * 1e6)])
            head = messages.head_of(message, exchange, routing_key, id=ids.new_id().hex())
            self.station.mail.post(Letter(exchange, routing_key, head, body, ttl, bells(exchange, routing_key)))

    def _write(self, jobs: list[NewJob]) -> None:
        batch = groups.current()
        if batch is None or self.station.recorded() is not None:
            self.station.write(jobs)
        else:
            batch.write(self, jobs)

    def _revoke(self, revoke: Revoke) -> None:
        """Written before any worker hears of it, so that it holds for those that are not there now, and for later retries: what waits
        ends as cancelled, with a notice for a worker to tell it; what runs is the workers' affair."""
        dialect = self.station.dialect
        stamped = self._waiting_with(revoke.stamps) if revoke.stamps else []

        def verb(keys: Sequence[str], task_ids: Sequence[str], jobs: Sequence[bytes], session: Session) -> None:
            routing.revoke(dialect, session, keys, round(REVOKED_FOR * 1e6))
            found = [job for task_id in task_ids for job in routing.waiting_messages(dialect, session, task_id)]
            for job_id in (*found, *jobs):
                if waiting := routing.cancel_revoked(dialect, session, job_id):
                    dialect.enqueue(session, messages.notice_of(waiting))

        steps = [partial(verb, some, some, ()) for some in _parts(sorted(revoke.task_ids))]
        if revoke.stamps:
            first, *rest = _parts(stamped) or [[]]
            steps += [partial(verb, sorted(revoke.stamps), (), first), *(partial(verb, (), (), some) for some in rest)]
        for step in steps:
            self._do(step, write=True, joins=False)

    def _waiting_with(self, stamps: frozenset[str]) -> list[bytes]:
        """Ids of waiting messages that carry one of the stamps. The database reads them all, for there is no index of what is in a head;
        before the transaction, since on SQLite that would hold up every writer."""
        found: list[bytes] = []
        after, dialect = ids.ZERO, self.station.dialect

        def look(session: Session) -> list[tuple[bytes, bytes]]:
            return routing.waiting_heads(dialect, session, messages.STAMPED, after, HEADS_AT_ONCE)

        while heads := self.station.read(look):
            found += [job_id for job_id, head in heads if stamps & messages.stamps_in(head)]
            after = heads[-1][0]
        return found

    def _join(self, block: joined.Block, jobs: list[NewJob]) -> None:
        database = self.station.database
        block.check(database)
        if block.buffer is not None:
            for job in jobs:
                block.buffer.add(database, [job])
            return
        with joined.failures(database):
            session = block.session(database)
            for job in jobs:
                self.station.dialect.enqueue(session, job, database.database_id)


def check_queue(name: str) -> None:
    """The broker has any queue but dbqueue's own: through it, what only an outbox may write could be written, taken and purged. Raises
    ReservedName, which kombu does not try again."""
    if name and name.startswith(RESERVED_PREFIX):
        raise ReservedName(
            f"queue name {name!r} begins with {RESERVED_PREFIX!r}, which dbqueue keeps for itself. Choose another."
        )


def _parts(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[first : first + REVOKED_AT_ONCE] for first in range(0, len(items), REVOKED_AT_ONCE)]


def _us(route: Route) -> int | None:
    return None if route.message_ttl_ms is None else route.message_ttl_ms * 1_000


def _unroutable(exchange: str) -> Unroutable:
    return Unroutable(
        f"no queue is bound to the exchange {exchange!r} with this routing key, so the message would be lost although your "
        "transaction commits: declare the queue first"
    )
