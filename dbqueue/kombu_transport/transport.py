"""What kombu's Connection and Celery's event loop hold.

With an event loop (``register_with_event_loop``) one descriptor becomes readable when messages have arrived; on PostgreSQL the loop
also settles and claims by itself (``express``), without waiting for an answer. Everybody else calls ``drain_events``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
from typing import Any

from kombu.exceptions import OperationalError
from kombu.transport import base, virtual

from dbqueue import __version__
from dbqueue.errors import ConnectionLost, DatabaseBusy
from dbqueue.kombu_transport import groups
from dbqueue.kombu_transport import options as configuration
from dbqueue.kombu_transport.channel import Channel, next_place, tasks_begun
from dbqueue.kombu_transport.express import Express
from dbqueue.kombu_transport.options import Options
from dbqueue.kombu_transport.station import Station, enter, leave

WANTED_FOR = 1.0
"""Seconds for which a drain that would not wait still wants messages: the next one finds them."""


class Transport(virtual.Transport):
    Channel = Channel
    can_parse_url = True
    driver_type = "dbqueue"
    driver_name = "dbqueue"
    polling_interval = None
    default_port = None

    connection_errors = (*base.Transport.connection_errors, ConnectionLost, OSError)
    channel_errors = (*base.Transport.channel_errors, DatabaseBusy)
    recoverable_connection_errors = (ConnectionLost, OSError, OperationalError)
    recoverable_channel_errors = (DatabaseBusy,)

    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._options: Options | None = None
        self._station: Station | None = None
        self._pid = os.getpid()
        self._news = threading.Condition()
        self._drainers = 0
        self._wanted_until = 0.0
        self._error: ConnectionLost | None = None
        self._loop: Any = None
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None
        self._rung = False
        self._express: Express | None = None
        _let_celery_mingle()
        _let_celery_hide_the_password()
        groups.install()

    # -- connecting --------------------------------------------------------------------------------------------------

    def driver_version(self) -> str:
        return __version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        with contextlib.suppress(Exception):
            uri = configuration.database_url(self.client)
        return configuration.shown((uri or "").removeprefix("dbqueue+"), include_password=include_password, mask=mask)

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {}

    @property
    def station(self) -> Station:
        if self._station is None or self._pid != os.getpid():
            raise ConnectionLost("this connection is closed, or belongs to the process that this one was forked from")
        return self._station

    def establish_connection(self) -> Any:
        """Really reaches the database, and raises if it cannot."""
        if self._options is None:
            client = self.client
            given = client.transport_options or {}
            self._options = configuration.read(_patient(client), given, client.ssl)
        if self._station is not None:
            self._leave()
        self._pid = os.getpid()
        station = enter(self._options)
        try:
            station.check()
        except BaseException:
            leave(station)
            raise
        self._station, self._error = station, None
        return self

    def verify_connection(self, connection: Any) -> bool:
        return self._station is not None and self._pid == os.getpid() and self._error is None

    def create_channel(self, connection: Any) -> Any:
        """``connection`` is what ``establish_connection`` returned; after a failover that is another transport than the one that
        kombu asks here."""
        channel = Channel(connection)
        connection.channels.append(channel)
        return channel

    def close_connection(self, connection: Any) -> None:
        if self._pid != os.getpid():
            self._collect(connection)
            return
        self._unregister()
        for channel in list(self.channels):
            channel.close()
        self.channels.clear()
        self._leave()

    def _leave(self) -> None:
        station, self._station = self._station, None
        if station is not None:
            leave(station)

    def _collect(self, connection: Any) -> None:
        """Forgets everything without a word to the database: in a forked child it belongs to the parent. In its own process the
        connection is given up: what was not started goes back."""
        if self._pid == os.getpid():
            if self._station is not None:
                self.close_connection(connection)
            return
        self._station = self._loop = self._reader = self._writer = self._express = None
        self.channels.clear()

    # -- what the station's thread tells -----------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether messages are wanted now: an event loop is there, or somebody drains."""
        return self._loop is not None or self._drainers > 0 or time.monotonic() < self._wanted_until

    def arrived(self) -> None:
        with self._news:
            self._news.notify_all()
            self._ring()

    def trouble(self, error: ConnectionLost | None) -> None:
        self._error = error
        self.arrived()

    # -- draining ----------------------------------------------------------------------------------------------------

    def drain_events(self, connection: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Delivers what has arrived, at least one message, or raises socket.timeout after ``timeout`` seconds. Of short-lived ones only
        one: who waits for replies counts them by their drains."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._deliver_all(one_letter=True):
                return
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                self._wanted_until = time.monotonic() + WANTED_FOR
                self.station.wake()
                raise TimeoutError("no message arrived in time")
            self._wait_for_news(left)

    def _wait_for_news(self, seconds: float | None) -> None:
        station = self.station
        with self._news:
            self._drainers += 1
        try:
            for channel in list(self.channels):
                if channel._by_tag:
                    station.news(channel.key)
            with self._news:
                if self._error is None and not any(channel.waiting for channel in self.channels):
                    self._news.wait(1.0 if seconds is None else min(seconds, 1.0))
        finally:
            with self._news:
                self._drainers -= 1

    def _deliver_all(self, *, one_letter: bool = False) -> int:
        if self._error is not None:
            error, self._error = self._error, None
            raise ConnectionLost(str(error)) from error
        if self._station is None:
            raise ConnectionLost("this connection is closed")
        # Not what arrives meanwhile: others want the loop too, and what comes to a channel after it was looked at may be older than
        # what comes to the next. And nothing behind a message whose task was executed, as a solo worker does it: its ack, and a
        # signal to stop, must not wait in the event loop until the next one is done as well.
        channels, end, done, begun = list(self.channels), next_place(), 0, tasks_begun()
        while channels and tasks_begun() == begun:
            first = min(channels, key=lambda channel: channel.place)
            if first.place >= end:
                break
            brief = first.brief
            done += first.deliver()
            if done and brief and one_letter:
                break
        return done

    # -- the event loop ----------------------------------------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self._unregister()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False
        self._loop = loop
        loop.add_reader(self._reader.fileno(), self._on_readable)
        self._express = self.station.drive(loop, self._ring_from_anywhere, self._on_answer)
        if self._express is not None:
            loop.on_tick.add(self._express.tick)
        for channel in list(self.channels):
            self.station.news(channel.key)
        self.arrived()  # what came before there was a loop

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        self._unregister()

    def _unregister(self) -> None:
        with self._news:
            loop, self._loop = self._loop, None
            reader, writer, self._reader, self._writer = self._reader, self._writer, None, None
        express, self._express = self._express, None
        if express is not None:
            if loop is not None:
                loop.on_tick.discard(express.tick)
                express.leave_loop()
            if self._station is not None:
                self._station.stop_driving(express)
        if reader is None or writer is None:
            return
        if loop is not None:
            with contextlib.suppress(Exception):
                loop.remove_reader(reader.fileno())
        reader.close()
        writer.close()

    def _ring(self) -> None:
        if self._writer is not None and not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):
                self._writer.send(b"!")

    def _ring_from_anywhere(self) -> None:
        with self._news:
            self._ring()

    def _on_answer(self) -> None:
        """A turn of the event loop's own has an answer, or a part of it."""
        express = self._express
        if express is not None:
            self._rung = True  # what it brings is delivered right here
            try:
                express.take()
            finally:
                self._rung = False
            self._deliver_in_loop()

    def _on_readable(self) -> None:
        if self._reader is None:
            return
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        self._rung = False
        self._deliver_in_loop()

    def _deliver_in_loop(self) -> None:
        self._deliver_all()
        if any(channel.waiting for channel in self.channels):
            self._ring()


def _patient(client: Any) -> str:
    """The URL, with kombu's connect_timeout as the driver's where nothing else is said."""
    url = configuration.database_url(client)
    if client.connect_timeout and url.startswith("postgres") and "connect_timeout=" not in url:
        url += ("&" if "?" in url else "?") + f"connect_timeout={max(2, round(client.connect_timeout))}"
    return url


def _let_celery_mingle() -> None:
    """Celery asks for the transport's name before workers look for each other; both work here as they do with RabbitMQ."""
    for module, name in (("mingle", "Mingle"), ("gossip", "Gossip")):
        step = getattr(sys.modules.get(f"celery.worker.consumer.{module}"), name, None)
        if step is not None:
            step.compatible_transports = {*step.compatible_transports, Transport.driver_type}


def _let_celery_hide_the_password() -> None:
    """Celery tells everybody who asks for a worker's statistics what its connection says of itself, and takes out the password where
    that stands alone; our URL is whole, as kombu needs it to make the connection again."""
    step = getattr(sys.modules.get("celery.worker.consumer.connection"), "Connection", None)
    if step is None or hasattr(step.info, "__wrapped__"):
        return
    info = step.info

    @functools.wraps(info)
    def without_password(self: Any, consumer: Any) -> Any:
        told = info(self, consumer)
        connection, broker = consumer.connection, told.get("broker")
        if isinstance(broker, dict) and connection and connection.transport.driver_type == Transport.driver_type:
            broker["hostname"] = connection.as_uri()
        return told

    step.info = without_password
