"""SQLite: which open transactions of the caller this thread has joined.

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
from functools import partial
from typing import Any

SUSPICION = 0.05
"""Seconds that a write of ours waits for the lock before it asks here: other writers have mostly gone by then."""

_MOST = 64  # a thread with more transactions open at once is no longer looked after


class _Mine(threading.local):
    def __init__(self) -> None:
        self.holders: dict[int, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {}


_mine = _Mine()


def remember(file: str, holder: Any, driver_connection: Callable[[Any], Any]) -> None:
    """This thread writes to ``file`` in the transaction of ``holder``: an object that lives as long as that transaction, and whose
    connection is ``driver_connection(holder)`` as long as it is in use."""
    try:
        find: Callable[[], Any] = weakref.ref(holder)
    except TypeError:  # sqlite3.Connection takes no weak references
        find = partial(_find, id(holder))
    holders = _mine.holders
    holders.pop(id(holder), None)
    holders[id(holder)] = os.path.realpath(file), find, driver_connection
    if len(holders) > _MOST:
        del holders[next(iter(holders))]


def holds_lock(file: str) -> bool:
    """Whether this thread has an open transaction on ``file`` that it joined."""
    found = False
    for number, (where, find, driver_connection) in list(_mine.holders.items()):
        if not _open(find(), driver_connection):
            del _mine.holders[number]
        elif where == os.path.realpath(file):
            found = True
    return found


def _find(number: int) -> Any:
    # Only asked when a write has waited for SUSPICION already: it walks every object of the process.
    return next((o for o in gc.get_objects() if id(o) == number and issubclass(type(o), sqlite3.Connection)), None)


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
