"""Where ``async def`` handlers run in a worker with thread slots: one event loop in a thread of its own, a task for each job.

They count as slots like any other job. A coroutine can be cancelled: at its timeout, when its claim is lost and at shutdown it gets
CancelledError at its next await. One that blocks the loop without awaiting holds up its neighbours, as in every asyncio program.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable

from dbqueue.runtime.execute import Outcome, Work, execute_async


class Coroutines:
    def __init__(self, finish: Callable[[Outcome], None]) -> None:
        self._finish = finish
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="dbqueue-coroutines", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, work: Work) -> None:
        self._loop.call_soon_threadsafe(self._spawn, work)

    def _spawn(self, work: Work) -> None:
        # A context of its own for each job; a task copies the one it is created in.
        task: asyncio.Task[None] = contextvars.Context().run(self._loop.create_task, self._run(work))
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)

        def cancel() -> None:
            work.context.noticed = True
            task.cancel()

        def tell() -> None:
            self._loop.call_soon_threadsafe(cancel)

        work.context.on_cancel = tell
        if work.context.is_cancelled:  # between the claim and this moment
            cancel()

    async def _run(self, work: Work) -> None:
        self._finish(await execute_async(work))

    def close(self, patience: float) -> bool:
        """Ends the loop when its tasks have ended, or after ``patience`` seconds; returns whether they had."""

        async def drain() -> None:
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=patience)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(drain(), self._loop)
        self._thread.join(patience + 1.0)
        ended = not self._thread.is_alive()
        if ended:
            self._loop.close()
        return ended
