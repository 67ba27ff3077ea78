"""Closes the pooled sessions of a process that has stopped publishing: a server has only so many, and pool children and web servers
live for days.

A thread does it, which is there only while a session is open: most programs that publish do so once and end.
"""

from __future__ import annotations

import threading

from dbqueue.database.engine import Database

LOOK_EVERY = 15.0
"""Seconds between two looks: a session is closed when it was in no use from one to the next."""


class IdleSessions:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._fresh = False
        if database.dialect.listens:  # an open SQLite file costs nobody anything
            database.pooled = self._watch

    def _watch(self) -> None:
        with self._lock:
            self._fresh = True
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="dbqueue-idle", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            self._fresh = False
            if self._database.close_idle():
                with self._lock:
                    if not self._fresh:  # else a session was opened just now
                        self._thread = None
                        return

    def close(self) -> None:
        self._ended.set()
