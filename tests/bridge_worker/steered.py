"""``dbqueue worker -A`` for the shop: started, asked and steered by remote control."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.transport.shops import Shop
from tests.waiting import wait_for

NODE = "w0@shop"

TASKS = """
from celery.exceptions import Ignore, Reject

@app.task(shared=False)
def fail():
    raise ValueError("no stock")

@app.task(shared=False)
def reject():
    raise Reject("no thanks", requeue=False)

@app.task(shared=False, send_events=False)
def quiet():
    note("quiet")
"""


def start(shop: Shop, *arguments: str, name: str = NODE, size: int = 1) -> subprocess.Popen[bytes]:
    """Starts one and waits until it answers."""
    process = shop.python(
        "-W", "ignore", "-m", "dbqueue", "worker", "-A", "shop", "-n", name, "-c", str(size), *arguments
    )
    ask = shop.app.app.control.inspect([name], timeout=1, limit=1).ping
    wait_for(lambda: process.poll() is not None or ask(), 60, "the worker does not answer")
    assert process.poll() is None, shop.log(process)
    return process


class Node:
    """What remote control says to one worker, and hears from it."""

    def __init__(self, shop: Shop, name: str = NODE) -> None:
        self._name, self._broadcast = name, shop.app.app.control.broadcast

    def __call__(self, command: str, **arguments: Any) -> Any:
        """The answer."""
        (answer,) = self._broadcast(
            command, arguments=arguments, destination=[self._name], reply=True, timeout=20, limit=1
        )
        return answer[self._name]


class Monitor:
    """Hears all events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def of(self, task_id: str) -> list[str]:
        """The kinds of a task's events, in the order of their clock."""
        mine = [event for event in self.events if event.get("uuid") == task_id]
        return [event["type"] for event in sorted(mine, key=lambda event: event["clock"])]

    def last(self, kind: str, **fields: Any) -> dict[str, Any] | None:
        found = [e for e in self.events if e["type"] == kind and fields.items() <= e.items()]
        return found[-1] if found else None

    def wait_for(self, kind: str, seconds: float = 30, **fields: Any) -> dict[str, Any]:
        return wait_for(lambda: self.last(kind, **fields) or {}, seconds, f"no event {kind} of {fields}")


@contextmanager
def monitored(shop: Shop) -> Iterator[Monitor]:
    monitor, app, ready = Monitor(), shop.app.app, threading.Event()
    ended = threading.Event()

    def consume() -> None:
        with app.connection_for_read() as given:
            receiver = app.events.Receiver(given, handlers={"*": monitor.events.append})
            with receiver.consumer_context() as (connection, _, __):
                ready.set()
                while not ended.is_set():
                    try:
                        connection.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        assert ready.wait(20)
        yield monitor
    finally:
        ended.set()
        thread.join()
