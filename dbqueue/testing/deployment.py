"""The developer's machine is no part of a test: while a case is open, DBQUEUE_* variables and dbqueue.toml do not exist
(D21).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dbqueue.settings import CONFIG_VARIABLE

_lock = threading.Lock()
_open = 0
_before: dict[str, str] = {}


@contextmanager
def hidden() -> Iterator[None]:
    """The environment belongs to the whole process, so the first of several blocks hides and the last one restores, in
    whatever order they end. A variable that a test sets itself inside the block counts until then."""
    global _open, _before
    with _lock:
        if _open == 0:
            _before = _take()
            # An empty file that is there wins over ./dbqueue.toml, for child processes too.
            os.environ[CONFIG_VARIABLE] = os.devnull
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                _take()
                os.environ.update(_before)


def _take() -> dict[str, str]:
    return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("DBQUEUE_")}
