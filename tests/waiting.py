"""Waiting for a fact. Tests never sleep and hope: they poll what they are waiting for, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.005


def wait_for(condition: Callable[[], T], deadline: float = 10.0, message: str = "the condition did not come true") -> T:
    """Call `condition` every few milliseconds until it returns something true, and return that.

    After `deadline` seconds it raises AssertionError with the message and what the condition returned last. An
    exception from the condition is not swallowed. The deadline is only there to end a broken test: it costs a passing
    one nothing, so leave it generous.
    """
    end = time.monotonic() + deadline
    while True:
        last_try = time.monotonic() >= end
        value = condition()
        if value:
            return value
        if last_try:
            raise AssertionError(f"{message} (waited {deadline:g} s, last saw {value!r})")
        time.sleep(_POLL_S)
