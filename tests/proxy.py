"""A TCP proxy before PostgreSQL that loses connections at the moment a test chooses.

`lose_answer` lets the server do what it was sent and keeps its answer: the client cannot know that the COMMIT succeeded.
`lose_request` cuts before the server has seen anything. `cut` ends all connections at once, whatever the server is doing.
`lose_answers` goes on losing answers by chance; `lost` then tells which, so that a test can find out what they were about.
`requests` counts what was asked: one is a statement, or several behind one Sync.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

_IDLE = b"Z\x00\x00\x00\x05I"  # ReadyForQuery, outside of a transaction: what was sent is committed (or was refused)
_READY = re.compile(rb"Z\x00\x00\x00\x05[ITE]")  # ReadyForQuery, wherever a transaction may be
_SYNC = b"S\x00\x00\x00\x04"  # ends a request of the extended protocol


@dataclass(frozen=True)
class Lost:
    """An answer that did not come back: ``port`` is the one from which the server saw its client come; instants in microseconds of
    time.time(): when the request went to the server, and when the whole answer had come from there."""

    port: int
    sent: int
    done: int


class Proxy:
    """Forwards to the server of a URL. `armed` tells whether the next loss is still to come."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (str(parts.hostname), int(parts.port or 5432))
        self._listener = socket.create_server(("127.0.0.1", 0))
        user = parts.netloc.rpartition("@")[0]
        self.url = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{self._listener.getsockname()[1]}"))
        self._plan: tuple[Literal["answer", "request"], bytes] | None = None
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self.losses = self.requests = 0
        self.lost: list[Lost] = []
        self._share, self._chance = 0.0, random.Random()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer(self, marker: bytes = b"") -> None:
        """The next data from a client that contains ``marker`` reaches the server, and its answer does not come back."""
        self._plan = ("answer", marker)

    def lose_request(self, marker: bytes = b"") -> None:
        """The next data from a client that contains ``marker`` does not reach the server."""
        self._plan = ("request", marker)

    def lose_answers(self, share: float, seed: int = 0) -> None:
        """From now on this share of all requests, of connections that are made already, goes without an answer; 0 ends it."""
        with self._lock:
            self._share, self._chance = share, random.Random(seed)

    @property
    def armed(self) -> bool:
        return self._plan is not None

    def cut(self) -> None:
        for pair in list(self._pairs):
            pair.cut()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.cut()

    def _take_plan(self, data: bytes, *, made: bool) -> str | None:
        with self._lock:
            if (
                self._share
                and made
                and (data[:1] == b"Q" or data.endswith(_SYNC))
                and self._chance.random() < self._share
            ):
                return "any answer"
            if self._plan is None or self._plan[1] not in data:
                return None
            what, self._plan = self._plan[0], None
            return what

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                pair = _Pair(self, client, socket.create_connection(self._server))
                self._pairs.append(pair)
                threading.Thread(target=pair.forward, daemon=True).start()
                threading.Thread(target=pair.backward, daemon=True).start()


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._swallowing = self._whole = self._made = False
        self._port, self._sent = server.getsockname()[1], 0

    def forward(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                self._proxy.requests += data[:1] == b"Q" or data.endswith(_SYNC)
                what = self._proxy._take_plan(data, made=self._made)
                if what == "request":
                    self._proxy.losses += 1
                    break
                if what is not None:
                    self._whole = what == "answer"
                    self._sent = time.time_ns() // 1_000
                    self._swallowing = True
                self._server.sendall(data)
        if not self._swallowing:
            self.cut()

    def backward(self) -> None:
        kept = b""
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if not self._swallowing:
                    self._made = self._made or _IDLE in data
                    self._client.sendall(data)
                    continue
                kept += data
                if _IDLE in kept or (not self._whole and _READY.search(kept)):  # the server has done all of it
                    self._proxy.losses += 1
                    self._proxy.lost.append(Lost(self._port, self._sent, time.time_ns() // 1_000))
                    break
        self.cut()

    def cut(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
