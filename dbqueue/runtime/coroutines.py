"""Where ``async def`` handlers run in a worker with thread slots: one event loop in a thread of its own, a task for each job.

They count as slots like any other job. A coroutine can be cancelled: at its timeout, when its claim is lost and at shutdown it gets
CancelledError at its next await. One that blocks the loop without awaiting holds up its neighbours, as in every asyncio program.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dbqueue.runtime.execute import Outcome, Work, execute_async
from dbqueue.states import Kind, State

log = logging.getLogger("dbqueue.jobs")


class Coroutines:
    def __init__(self, finish: Callable[[Outcome], None]) -> None:
        self._finish = finish
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Outcome]] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="dbqueue-coroutines", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            try:
                self._loop.run_forever()
            except BaseException as error:  # asyncio lets a SystemExit of any task through; the others go on
                log.error("%s in a task that a job had left behind", type(error).__name__, exc_info=error)
        self._loop.close()

    def start(self, work: Work) -> None:
        self._loop.call_soon_threadsafe(self._spawn, work)

    def _spawn(self, work: Work) -> None:
        began = time.monotonic()
        # A context of its own for each job; a task copies the one it is created in.
        task: asyncio.Task[Outcome] = contextvars.Context().run(self._loop.create_task, execute_async(work))
        self._tasks.add(task)  # the loop itself holds tasks weakly

        def finish(_: object) -> None:
            self._tasks.discard(task)
            if task.cancelled():  # before its first step, so that the handler never began
                error: BaseException | None = asyncio.CancelledError()
            elif (error := task.exception()) is None:
                self._finish(task.result())
                return
            summary = type(error).__name__
            self._finish(Outcome(work, State.PENDING, Kind.FAILED, summary, time.monotonic() - began))

        task.add_done_callback(finish)

        def cancel() -> None:
            if task.cancel():  # not when it has ended: then nothing stopped it half-way
                work.context.noticed = True

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(cancel)

        work.context.on_cancel = tell
        if work.context.is_cancelled:  # between the claim and this moment
            cancel()

    def close(self, patience: float) -> bool:
        """Ends the loop when its tasks have ended, or after ``patience`` seconds; returns whether they had."""

        async def drain() -> None:
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=patience)
            self._closing = True
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(drain(), self._loop)
        self._thread.join(patience + 1.0)
        return not self._thread.is_alive()
