"""When a failed job is tried again: pure arithmetic, whole microseconds, no overflow (D14).

A ``Backoff`` doubles (or as ``factor`` says) up to its cap; ``Delays`` are written out one by one and the last repeats.

    attempt that failed      1     2     3     4   ...  10
    Backoff(1, 300)          1 s   2 s   4 s   8 s      300 s
    Delays([1, 5, 60])       1 s   5 s   60 s  60 s     60 s
"""

from __future__ import annotations

import random as _random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dbqueue.errors import InvalidArgument
from dbqueue.settings import TABLES, describe

SECOND = 1_000_000
"""Microseconds in a second."""
MAX_DELAY = TABLES["jobs"]["retry_max_ms"].high / 1_000
"""Seconds: seven days, the bound of the setting. Who waits longer wants a schedule."""
MAX_DELAYS = 100
"""As many as a target may have attempts (D1)."""

BOUNDS: dict[str, tuple[float, float]] = {
    "base": (0.001, MAX_DELAY),
    "maximum": (0.001, MAX_DELAY),
    "factor": (1.0, 1_000.0),  # below 1 the waits would shrink
    "jitter": (0.0, 1.0),
    "delay": (0.0, MAX_DELAY),
}


@dataclass(frozen=True)
class Backoff:
    """``min(maximum, base * factor ** (attempt - 1))`` seconds, shortened at random by up to the share ``jitter``.

    Jitter only shortens, so that ``maximum`` stays the longest wait that anybody sees.
    """

    base: float
    maximum: float
    factor: float = 2.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base", "maximum", "factor", "jitter"):
            _check(f"Backoff({name}=...)", name, getattr(self, name))
        if self.maximum < self.base:
            raise InvalidArgument(
                f"Backoff(maximum=...) must not be below base: {self.maximum} is below {self.base}. Raise it."
            )

    def delay_us(self, attempt: int, random: Callable[[], float] = _random.random) -> int:
        """The wait after ``attempt`` (from 1) failed. ``random`` returns a float in 0..1."""
        try:
            delay = min(self.maximum, self.base * self.factor ** min(_attempt(attempt) - 1, 10**9))
        except OverflowError:  # the power exceeds a float, so it exceeds the cap
            delay = self.maximum
        if self.jitter:
            delay *= 1.0 - self.jitter * random()
        return round(delay * SECOND)


@dataclass(frozen=True)
class Delays:
    """Fixed waits in seconds, one for each failed attempt; the last one repeats."""

    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, (list, tuple)):
            raise InvalidArgument(f"Delays(seconds) must be a list or tuple; got {type(self.seconds).__name__}.")
        if not 1 <= len(self.seconds) <= MAX_DELAYS:
            raise InvalidArgument(f"Delays(seconds) must have 1 to {MAX_DELAYS} entries; it has {len(self.seconds)}.")
        for index, delay in enumerate(self.seconds):
            _check(f"Delays(seconds)[{index}]", "delay", delay)
        object.__setattr__(self, "seconds", tuple(self.seconds))

    def delay_us(self, attempt: int, random: Callable[[], float] = _random.random) -> int:
        """The wait after ``attempt`` (from 1) failed. ``random`` is not asked: these waits are meant as written."""
        return round(self.seconds[min(_attempt(attempt), len(self.seconds)) - 1] * SECOND)


Retry = Backoff | Delays


def parse(value: object, default: Retry) -> Retry:
    """What ``@queue.job(retry=...)`` accepts: None (the settings' ``default``), a ``Backoff``, ``Delays``, a list or
    tuple of seconds, or one number of seconds for every wait."""
    if value is None:
        return default
    if isinstance(value, (Backoff, Delays)):
        return value
    if isinstance(value, (list, tuple)):
        return Delays(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Delays((value,))
    raise InvalidArgument(
        f"retry must be None, a Backoff, Delays, a list of seconds or a number of seconds; got {type(value).__name__}."
    )


def _check(label: str, name: str, value: object) -> None:
    low, high = BOUNDS[name]
    # NaN fails every comparison, so it is refused too.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        bounds = f"from {low:.15g} to {high:.15g}"
        raise InvalidArgument(f"{label} must be a number {bounds}; got {describe(value)}. Correct it.")


def _attempt(attempt: object) -> int:
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 1:
        raise InvalidArgument("attempt must be an int from 1: the number of the attempt that failed.")
    return attempt
