"""SQLite: which open transactions of the caller this thread has joined, and which of our own are open in this process.

A file has one writer. If that is this very thread, on the caller's connection, a write on a connection of dbqueue's own would
wait for it for ever; ``holds_lock`` tells, so that it fails at once (WouldDeadlock). Nothing here keeps a connection alive: one
that its owner drops in the middle of a transaction is to be closed and rolled back as ever.
"""

from __future__ import annotations

import gc
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUSPICION = 0.05
"""Seconds that a write of ours waits for the lock before it asks here: other writers have mostly gone by then."""

_MOST = 64  # a thread with more transactions open at once is no longer looked after


@dataclass(frozen=True)
class _Joined:
    file: str
    holder: Callable[[], Any]
    driver_connection: Callable[[Any], Any]


class _Mine(threading.local):
    def __init__(self) -> None:
        self.joined: dict[int, _Joined] = {}


_mine = _Mine()


def remember(file: str, holder: Any, driver_connection: Callable[[Any], Any]) -> None:
    """This thread writes to ``file`` in the transaction of ``holder``: an object that lives as long as that transaction, and whose
    connection is ``driver_connection(holder)`` as long as it is in use."""
    reference = _reference(holder)
    if reference is None:
        return
    joined = _mine.joined
    joined.pop(id(holder), None)
    joined[id(holder)] = _Joined(os.path.realpath(file), reference, driver_connection)
    if len(joined) > _MOST:
        del joined[next(iter(joined))]


def holds_lock(file: str) -> bool:
    """Whether this thread has an open transaction on ``file`` that it joined."""
    joined = _mine.joined
    for number, one in list(joined.items()):
        if not _open(one.holder(), one.driver_connection):
            del joined[number]
    return any(one.file == os.path.realpath(file) for one in joined.values())


def _reference(holder: Any) -> Callable[[], Any] | None:
    """A weak reference. A plain sqlite3.Connection takes none, but the cache of its statements does, which lives and dies with it
    and knows it. (Not so in Python 3.10: there such a write waits out its patience.)"""
    try:
        return weakref.ref(holder)
    except TypeError:
        cache = next((part for part in gc.get_referents(holder) if getattr(part, "__wrapped__", None) is holder), None)
        if cache is None:
            return None
        reference = weakref.ref(cache)
        return lambda: getattr(reference(), "__wrapped__", None)


def _open(holder: Any, driver_connection: Callable[[Any], Any]) -> bool:
    if holder is None:
        return False
    try:
        connection = driver_connection(holder)
        if isinstance(connection, sqlite3.Connection):
            sqlite3.Cursor(connection).close()  # raises if it is closed, or by now belongs to another thread
        return bool(connection.in_transaction)
    except Exception:  # given back, closed or invalidated
        return False


# -- forks -------------------------------------------------------------------------------------------------------------

FORK_PATIENCE = 5.0
"""Seconds that a fork waits for transactions of other threads at most; ours are over in milliseconds."""


class _Writers:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Sessions that hold the write lock or ask for it just now, and their threads."""

    def only_mine(self) -> bool:
        me = threading.get_ident()
        return all(thread == me for thread in self.threads.values())


_writers = _Writers()


def entered(session: object) -> None:
    """This thread asks for the write lock, and gets it or not at once."""
    writers = _writers
    with writers.changed:
        writers.threads[session] = threading.get_ident()


def left(session: object) -> None:
    """It does not have it any more."""
    writers = _writers
    with writers.changed:
        writers.threads.pop(session, None)
        writers.changed.notify_all()


def _before_fork() -> None:
    _writers.changed.acquire()  # until the fork is made: nobody enters meanwhile
    _writers.changed.wait_for(_writers.only_mine, FORK_PATIENCE)


def _in_parent() -> None:
    _writers.changed.release()


def _in_child() -> None:
    global _writers
    _writers = _Writers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
