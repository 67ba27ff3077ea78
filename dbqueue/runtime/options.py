"""What one worker may be told beside its queue's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dbqueue import settings
from dbqueue.errors import ConfigError
from dbqueue.runtime.deliver import Delivery
from dbqueue.runtime.processes import ChildOptions

MOST_SLOTS = 1_000
POOLS = ("threads", "processes", "prefork")
"""The last two are one: prefork is Celery's name for it."""


@dataclass(frozen=True)
class WorkerOptions:
    """None: the queue's settings. Seconds."""

    queues: tuple[str, ...] | None = None
    slots: int | None = None
    lease: float | None = None
    name: str | None = None
    """Begins the worker's name in logs and rows; the rest of it is never used twice."""
    once: bool = False
    """Ends when nothing is due any more."""
    max_jobs: int | None = None
    """Ends after this many jobs were claimed and settled."""
    shutdown: float = 30.0
    """How long running jobs may take to end after a stop was asked for."""
    pool: str = "threads"
    """Where jobs run: threads (and ``async def`` handlers in an event loop), or processes."""
    child: ChildOptions | None = None
    """What the children of process slots import first, and when they are replaced."""
    health_file: str | None = None
    """Written once a second while the loop comes round and the database answers; see ``health``."""
    outboxes: tuple[Delivery, ...] = ()
    """Delivered beside the jobs of ``queues``; of an outbox that is not named here, no message is claimed."""

    def check(self) -> None:
        """Raises ConfigError, InvalidName."""
        if self.slots is not None and not (_whole(self.slots) and 1 <= self.slots <= MOST_SLOTS):
            raise ConfigError(f"a worker has 1 to {MOST_SLOTS} slots (-c); got {settings.describe(self.slots)}")
        if self.max_jobs is not None and not (_whole(self.max_jobs) and self.max_jobs >= 1):
            raise ConfigError(
                f"a worker ends after 1 or more jobs (--max-jobs); got {settings.describe(self.max_jobs)}"
            )
        seconds = self.shutdown
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise ConfigError(f"--shutdown is a number of seconds from 0; got {settings.describe(seconds)}")
        if self.pool not in POOLS:
            raise ConfigError(f"-P is one of {', '.join(POOLS)}; got {settings.describe(self.pool)}")
        names = [delivery.target().name for delivery in self.outboxes]
        if len(names) != len(set(names)):
            raise ConfigError("an outbox is delivered by one callable; --outbox names one of them twice")
        if self.name is not None:
            settings.check_name("worker", self.name)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
