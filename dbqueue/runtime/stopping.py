"""How a worker ends: told, running jobs asked to stop, handed back, left to their leases. Only flags and times, no
action.

Asked once (SIGTERM): running jobs may end within the patience; then their cancel flags are set, a moment later they
are handed back. Asked twice: the flags are set at once. A database that does not answer holds nobody up: what cannot
be handed back in time keeps its lease.
"""

from __future__ import annotations

import time

NEVER = float("inf")

FLAG_GRACE, HURRIED_GRACE = 1.0, 0.1
"""Seconds from the cancel flags to handing back what still runs."""
HAND_BACK_PATIENCE = 2.0
"""Seconds for telling the database."""

_QUIET, _TOLD, _FLAGGED, _HANDED_BACK, _LEFT = range(5)


class Stopping:
    def __init__(self) -> None:
        self.reason: str | None = None
        self._asked = self._hurried = False
        self._drain_until = self._until = NEVER
        self._stage = _QUIET

    def ask(self, reason: str, patience: float) -> None:
        """From outside: any thread, or a signal handler."""
        if self._asked:
            self._hurried = True
            return
        self._asked = True
        self.begin(reason, patience)

    def begin(self, reason: str, patience: float) -> None:
        """From inside, which does not count as having been asked. The time goes first: the reason makes it count."""
        self._drain_until = min(self._drain_until, time.monotonic() + patience)
        if self.reason is None:
            self.reason = reason

    @property
    def begun(self) -> bool:
        return self.reason is not None

    @property
    def flagged(self) -> bool:
        return self._stage >= _FLAGGED

    @property
    def next_at(self) -> float:
        if self._stage == _QUIET:
            return 0.0 if self.begun else NEVER
        if self._stage == _TOLD:
            return 0.0 if self._hurried else self._drain_until
        return self._until

    def told(self) -> bool:
        """True once, when it has begun."""
        if self._stage == _QUIET and self.begun:
            self._stage = _TOLD
            return True
        return False

    def flag_due(self, now: float) -> bool:
        if self._stage == _TOLD and now >= self.next_at:
            self._stage, self._until = _FLAGGED, now + (HURRIED_GRACE if self._hurried else FLAG_GRACE)
            return True
        return False

    def hand_back_due(self, now: float) -> bool:
        if self._stage == _FLAGGED:
            if self._hurried:
                self._until = min(self._until, now + HURRIED_GRACE)
            if now >= self._until:
                self._stage, self._until = _HANDED_BACK, now + HAND_BACK_PATIENCE
                return True
        return False

    def leave_due(self, now: float) -> bool:
        if self._stage == _HANDED_BACK and now >= self._until:
            self._stage, self._until = _LEFT, NEVER
            return True
        return False
