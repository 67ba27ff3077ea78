"""SQLite in a program that forks while its other threads use it, as the parent of a pool of processes does.

SQLite guards its allocator and its list of open files with mutexes of the process. A child that was forked while another thread held
one of them finds it held for ever, and hangs at its first statement, on whatever file. So a fork waits until no other thread is inside
of a call on one of our connections, and lets none in meanwhile. That takes microseconds: none of our calls waits for a lock inside of
SQLite, but for one in a mail file.

It waits for their transactions, too: what SQLite notes about a file's locks is of the process, and a child that was forked in the
middle of one would take the write lock for held, by a connection of its own, for ever.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from typing import Any

TRANSACTION_PATIENCE = 5.0
"""Seconds that a fork waits for transactions of other threads at most; ours are over in milliseconds."""
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


class Writers:
    """Sessions that hold the write lock or ask for it just now, and their threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def only_mine(self) -> bool:
        me = threading.get_ident()
        return all(thread == me for thread in self._threads.values())

    def enter(self, session: object) -> None:
        """This thread asks for the write lock, and gets it or not at once."""
        with self.changed:
            self._threads[session] = threading.get_ident()

    def leave(self, session: object) -> None:
        """It does not have it any more."""
        with self.changed:
            if self._threads.pop(session, None) is not None:
                self.changed.notify_all()


writers = Writers()


def _before_fork() -> None:
    """First the transactions, whose statements must come through the gate until they have ended."""
    writers.changed.acquire()  # until the fork is made: nobody enters meanwhile
    writers.changed.wait_for(writers.only_mine, TRANSACTION_PATIENCE)
    gate.close()


def _in_parent() -> None:
    gate.open()
    writers.changed.release()


def _in_child() -> None:
    gate.renew()
    writers.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


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
