"""A TCP proxy that can fall silent: its connections stay open, and nothing comes through any more.

So does a firewall that forgot a connection, or a server behind a load balancer that lost its machine: nobody gets an error.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit, urlunsplit


class SilentProxy:
    """``hush`` takes the voice of every connection that is open now; later ones work. ``forwarded`` counts them all."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (str(parts.hostname), int(parts.port or 5432))
        self._listener = socket.create_server(("127.0.0.1", 0))
        user = parts.netloc.rpartition("@")[0]
        self.url = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{self._listener.getsockname()[1]}"))
        self._hushed: set[socket.socket] = set()
        self._sockets: list[socket.socket] = []
        self.forwarded = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def hush(self) -> None:
        self._hushed.update(self._sockets)

    def cut(self) -> None:
        """Ends every connection that is open now: the silence becomes an error."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                self.forwarded += 1
                for source, drain in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, drain), daemon=True).start()

    def _forward(self, source: socket.socket, drain: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self._hushed:  # read all the same: the sender sees its bytes acknowledged
                    drain.sendall(data)
        for end in (source, drain):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
