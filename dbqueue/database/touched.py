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
from dataclasses import dataclass
from typing import Any

SUSPICION = 0.05
"""Seconds that a write of ours waits for the lock before it asks here: other writers have mostly gone by then."""

_MOST = 64  # a thread with more transactions open at once is no longer looked after


@dataclass(frozen=True)
class _Joined:
    file: str
    holder: Callable[[], Any] | None
    """None: a plain sqlite3.Connection, which takes no weak references and is looked for by its id."""
    driver_connection: Callable[[Any], Any]


class _Mine(threading.local):
    def __init__(self) -> None:
        self.joined: dict[int, _Joined] = {}


_mine = _Mine()


def remember(file: str, holder: Any, driver_connection: Callable[[Any], Any]) -> None:
    """This thread writes to ``file`` in the transaction of ``holder``: an object that lives as long as that transaction, and whose
    connection is ``driver_connection(holder)`` as long as it is in use."""
    try:
        reference = weakref.ref(holder)
    except TypeError:
        reference = None
    joined = _mine.joined
    joined.pop(id(holder), None)
    joined[id(holder)] = _Joined(os.path.realpath(file), reference, driver_connection)
    if len(joined) > _MOST:
        del joined[next(iter(joined))]


def holds_lock(file: str) -> bool:
    """Whether this thread has an open transaction on ``file`` that it joined. Asked only when a write has waited for SUSPICION
    already: it may walk every object of the process."""
    joined = _mine.joined
    wanted = {number for number, one in joined.items() if one.holder is None}
    plain = (
        {id(o): o for o in gc.get_objects() if id(o) in wanted and issubclass(type(o), sqlite3.Connection)}
        if wanted
        else {}
    )
    for number, one in list(joined.items()):
        if not _open(one.holder() if one.holder else plain.get(number), one.driver_connection):
            del joined[number]
    return any(one.file == os.path.realpath(file) for one in joined.values())


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
