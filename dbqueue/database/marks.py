"""Where a worker's claims begin to look, and how much of one they take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dbqueue.ids import ZERO


def step_limit(limit: int) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... that is not above ``limit``: a LIMIT is a literal (with a parameter there every
    execution is planned anew), so there must be few texts, and each is prepared once on a connection."""
    power = 1 << (limit.bit_length() - 1)
    return power + power // 2 if power + power // 2 <= limit else power


class Marks:
    """Low-water marks of one worker connection: places in the indexes behind which nothing is left to find.

    A mark never passes ``now`` minus LAG: a transaction that took its time to commit lands behind the newest row seen, but
    rarely further back. What it lands behind is found by the sweep, which may cost 5 % of the time. A clock that stepped
    back resets every mark, since new jobs would be written behind it; a new connection starts without marks."""

    LAG = 200_000
    SHARE = 20
    SHORTEST = 0.02
    CHEAP = 0.02

    def __init__(self) -> None:
        self.now = 0
        self.lanes: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.waiting = 0
        self.lease = 0
        self.shortened = False
        """Whether claims from the future were looked for, since this connection was made or the clock went back."""
        self._next: dict[str, float] = {}
        self._cost: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def saw(self, now: int) -> None:
        if now < self.now:
            self.lanes.clear()
            self.waiting = self.lease = 0
            self.shortened = False
            self._next.clear()
        self.now = now

    def sweep_due(self, probe: str) -> bool:
        return time.monotonic() >= self._next.get(probe, 0.0)

    def may_look(self, probe: str) -> bool:
        """Whether a look that found little may be followed by a sweep: the budget is only there for sweeps that became dear."""
        return self._cost.get(probe, 0.0) <= self.CHEAP or self.sweep_due(probe)

    def swept(self, probe: str, began: float) -> None:
        """The cheaper of the last two sweeps counts: one that was planned anew, or met a busy moment, would forbid them for seconds."""
        now = time.monotonic()
        cost = now - began
        counts = min(cost, self._last.get(probe, 0.0))
        self._last[probe], self._cost[probe] = cost, counts
        self._next[probe] = now + max(self.SHORTEST, self.SHARE * counts)

    def claimed(self, queue: str, priority: int, ready_at: int, job_id: bytes) -> None:
        newest = self.now - self.LAG
        mark = (ready_at, job_id) if ready_at < newest else (newest, ZERO)
        self.lanes[queue, priority] = max(mark, self.lanes.get((queue, priority), (0, ZERO)))

    def lanes_of(self, queues: Sequence[str]) -> list[tuple[str, int, int, bytes]]:
        return [
            (queue, priority, *self.lanes[queue, priority])
            for queue in queues
            for priority in range(10)
            if (queue, priority) in self.lanes
        ]
