"""Signals only set flags; the loop that they wake does the rest."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}


@contextmanager
def stop_on_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop(name)``, each time, until the block ends. Off the main thread, where Python takes no
    handlers, the block changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop(NAMES[signal.Signals(number)])

    before = {number: signal.signal(number, handle) for number in NAMES}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was not set from Python, and Python cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
