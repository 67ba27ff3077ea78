"""SQLite: whether the process behind a claim lives, told by a lock of the operating system.

A lease alone cannot tell there: while somebody's long transaction holds the one write lock, nobody can renew, and when it ends the
first to come might be another worker's sweep. So a process that holds claims for long also holds a lock on a file of its own
beside the database, which the kernel takes away with the process. The sweep leaves a living owner's claims alone, and the owner may
renew and end them although their lease is over. A process without such a file has its lease only. Not on Windows.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

_own: dict[str, str] = {}
"""Files whose lock this process holds, and for which worker: a lock of one's own never refuses, and closing the file again would
drop it."""


class Alive:
    """Held from its making until ``close``, or the end of the process. A forked child does not hold it."""

    def __init__(self, database: str, worker: str) -> None:
        self._path, self._file = _path(database, worker), None
        if fcntl is None:
            return
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._file = open(self._path, "wb")  # noqa: SIM115 - as long as the lock is held
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._pid = os.getpid()
        _own[self._path] = worker

    def close(self) -> None:
        file: Any
        file, self._file = self._file, None
        if file is not None and self._pid == os.getpid():
            _own.pop(self._path, None)
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            file.close()


def own_workers(database: str) -> list[str]:
    """The workers of this process that hold a lock for this database."""
    folder = os.path.dirname(_path(database, ""))
    return [worker for path, worker in tuple(_own.items()) if os.path.dirname(path) == folder]


def is_alive(database: str, worker: str | None) -> bool:
    """Whether a process holds the lock of this worker; removes the file of one that is gone."""
    if fcntl is None or not worker:
        return False
    path = _path(database, worker)
    if path in _own:
        return True
    try:
        file = open(path, "r+b")  # noqa: SIM115
    except OSError:
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        with contextlib.suppress(OSError):
            os.unlink(path)
    return False


def _path(database: str, worker: str) -> str:
    # Beside the file itself: behind a symbolic link it has other names.
    return os.path.join(f"{os.path.realpath(database)}-alive", re.sub(r"[^A-Za-z0-9_.-]", "_", worker))


def _after_fork() -> None:
    _own.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
