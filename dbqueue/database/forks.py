"""SQLite in a program that forks while its other threads use it, as the parent of a pool of processes does.

SQLite guards its allocator and its list of open files with mutexes of the process. A child that was forked while another thread held
one of them finds it held for ever, and hangs at its first statement, on whatever file. So a fork waits until no other thread is inside
of a call on one of our connections, and lets none in meanwhile. That takes microseconds: none of our calls waits for a lock inside of
SQLite, but for one in a mail file.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from typing import Any

PATIENCE = 1.0
"""Seconds that a fork waits for other threads, and they for it; then each goes on all the same."""


class Gate:
    """Many threads at once are inside, or one forks."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}
        """Threads, and how deep: a finalizer may run within a call."""
        self._forks = 0
        self._news = threading.Condition(threading.Lock())

    # Who enters writes and then reads, who forks as well, the other way round: one of the two sees the other.
    def __enter__(self) -> None:
        own = threading.get_ident()
        depth = self._inside.get(own, 0)
        self._inside[own] = depth + 1
        if self._forks and not depth:
            with self._news:
                self._inside.pop(own, None)
                self._news.notify_all()
                self._news.wait_for(lambda: not self._forks, PATIENCE)
                self._inside[own] = 1

    def __exit__(self, *_: object) -> None:
        own = threading.get_ident()
        depth = self._inside.pop(own, 1)
        if depth > 1:
            self._inside[own] = depth - 1
        elif self._forks:
            with self._news:
                self._news.notify_all()

    def close(self) -> None:
        own = threading.get_ident()
        with self._news:
            self._forks += 1
            self._news.wait_for(lambda: not set(self._inside) - {own}, PATIENCE)

    def open(self) -> None:
        with self._news:
            self._forks -= 1
            self._news.notify_all()

    def renew(self) -> None:
        """In the child only the forking thread lives."""
        self.__init__()  # type: ignore[misc]


gate = Gate()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.renew)


class GatedCursor(sqlite3.Cursor):
    def execute(self, *given: Any) -> GatedCursor:
        with gate:
            super().execute(*given)
        return self

    def executemany(self, *given: Any) -> GatedCursor:
        with gate:
            super().executemany(*given)
        return self

    def fetchone(self) -> Any:
        with gate:
            return super().fetchone()

    def fetchall(self) -> list[Any]:
        with gate:
            return super().fetchall()


class GatedConnection(sqlite3.Connection):
    def __init__(self, *given: Any, **options: Any) -> None:
        with gate:
            super().__init__(*given, **options)

    def cursor(self, factory: Any = GatedCursor) -> Any:
        return super().cursor(factory)

    def execute(self, *given: Any) -> Any:
        return self.cursor().execute(*given)

    def close(self) -> None:
        with gate:
            super().close()
