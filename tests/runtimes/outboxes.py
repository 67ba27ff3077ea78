"""What worker processes deliver outboxes with: `--outbox receipts=tests.runtimes.outboxes:deliver`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dbqueue import OutboxMessage, current_job
from tests.runtimes.jobs import end_with_parent, note

end_with_parent()
FOLDER = Path(os.environ["RUNTIMES_FOLDER"])


def deliver(message: OutboxMessage) -> None:
    """A payload of ``{"wait": name}`` waits for that gate, however long."""
    note(FOLDER, "deliver")
    assert current_job() is not None
    if isinstance(message.payload, dict):
        while not (FOLDER / f"{message.payload['wait']}.open").exists():
            time.sleep(0.005)
    note(FOLDER, "delivered")


def beat(message: OutboxMessage) -> None:
    """Goes on for half a second, with heartbeats or without."""
    note(FOLDER, "beat")
    for _ in range(10):
        time.sleep(0.05)
        if message.payload == "beats":
            message.heartbeat()


async def deliver_async(message: OutboxMessage) -> None:
    message.heartbeat()
    note(FOLDER, "deliver_async")
