"""A TCP proxy before PostgreSQL that loses connections at the moment a test chooses.

`lose_answer` lets the server do what it was sent and keeps its answer: the client cannot know that the COMMIT succeeded.
`lose_request` cuts before the server has seen anything. `cut` ends all connections at once, whatever the server is doing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

_IDLE = b"Z\x00\x00\x00\x05I"  # ReadyForQuery, outside of a transaction: what was sent is committed (or was refused)


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
        self.losses = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer(self, marker: bytes = b"") -> None:
        """The next data from a client that contains ``marker`` reaches the server, and its answer does not come back."""
        self._plan = ("answer", marker)

    def lose_request(self, marker: bytes = b"") -> None:
        """The next data from a client that contains ``marker`` does not reach the server."""
        self._plan = ("request", marker)

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

    def _take_plan(self, data: bytes) -> str | None:
        with self._lock:
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
        self._swallowing = False

    def forward(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                what = self._proxy._take_plan(data)
                if what == "request":
                    self._proxy.losses += 1
                    break
                if what == "answer":
                    self._swallowing = True
                self._server.sendall(data)
        if not self._swallowing:
            self.cut()

    def backward(self) -> None:
        kept = b""
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if not self._swallowing:
                    self._client.sendall(data)
                    continue
                kept += data
                if _IDLE in kept:  # the server has done all of it
                    self._proxy.losses += 1
                    break
        self.cut()

    def cut(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
