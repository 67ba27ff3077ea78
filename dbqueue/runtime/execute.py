"""One job's run: decode, call the handler, turn whatever happened into an ``Outcome``. No connection, no policy."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import Struct

from dbqueue.database.tables import ClaimedRow, Fact, Settlement
from dbqueue.errors import Bury, GoOn, RetryLater, summary_of
from dbqueue.payload import CorruptPayload
from dbqueue.runtime.context import JobContext, enter, leave
from dbqueue.states import Kind, State
from dbqueue.targets import Target, wish

log = logging.getLogger("dbqueue.jobs")


@dataclass(eq=False, slots=True)
class Work:
    """One claimed job on its way through a slot. Without a target it is never started."""

    row: ClaimedRow
    target: Target[Any] | None
    context: JobContext
    abandoned: bool = False
    verdict: Kind | None = None
    """It is not run any more: its target, a foreign one, is to tell that it ended so."""
    signal: int | None = None
    """By which it was asked to be terminated."""
    note: Any = None
    """What a foreign target says, in the worker's process, to itself in a slot: plain data."""


class Outcome(Struct, frozen=True):
    """How one run ended, as far as the handler can say: SUCCEEDED, BLOCKED, DEAD, or PENDING for "failed, try again". The loop knows the
    policy and decides. ``delay`` (microseconds) is the handler's own wish, and so is ``payload``, with which the job goes on.
    ``settled``: a foreign target has ended the row itself, and this is what the database said to that. ``report``: what such a target
    has to say to itself in the worker's process, plain data."""

    work: Work
    state: State
    kind: Kind | None
    summary: str | None
    duration: float
    delay: int | None = None
    payload: bytes | None = None
    settled: Fact | None = None
    report: Any = None


class ForeignTarget(Target[Any]):
    """A target whose rows were written by others, with no policy of ours in them: it says itself what they need, and how they end."""

    address: tuple[str, str]
    """Module and name of a function there that gives a child process the target of a name."""
    crashes = 3
    """Runs that may end with the death of their process or its worker; after the last one the target is asked to tell so."""

    opens = False
    """Its rows are those of other targets, which only their payload tells: ``opened`` gives them."""

    def opened(self, row: ClaimedRow) -> tuple[ClaimedRow, Target[Any] | None]:
        """The row as its own target takes it; None: there is no such target. Raises for one that cannot be read."""
        return row, self

    def ending(self, row: ClaimedRow, now: int) -> Settlement | None:
        """How this row ends that is not to be run, and of which there is nothing to tell. ``now``: of the claim."""
        return None

    def names(self, row: ClaimedRow) -> Sequence[str]:
        """Under which it may have been revoked."""
        return ()

    def verdict(self, row: ClaimedRow, now: int) -> Kind | None:
        """How it has ended before it begins: then the target is to tell so, and does not run it. ``now``: of the claim."""
        return None

    def waits(self, row: ClaimedRow, now: int) -> int:
        """Microseconds until it may begin, if it was handed out before its time. ``now``: of the claim."""
        return 0

    def timeout(self, row: ClaimedRow) -> float | None:
        """Seconds; None: it may take as long as it likes."""
        return None

    def starting(self, work: Work) -> None:
        """In the worker's loop, before a slot gets the row: may set its verdict and its note. It must not wait for anything."""

    def started(self, work: Work) -> None:
        """In the worker's loop: a slot has it."""

    def ended(self, work: Work, report: Any) -> None:
        """In the worker's loop: the database has agreed to the end of the row. Not called for a claim that was lost."""

    def run(self, work: Work) -> Outcome:
        """In a slot: runs the row, or ends it by ``work.verdict``."""
        raise NotImplementedError


def execute(work: Work) -> Outcome:
    """Decode, run, and turn whatever happened into an Outcome."""
    if isinstance(work.target, ForeignTarget):
        return work.target.run(work)
    began, call = time.monotonic(), _prepared(work)
    if isinstance(call, Outcome):
        return call
    token = enter(work.context)
    try:
        result = call()
        if result is not None and inspect.iscoroutine(result):  # in a child process, which runs one job at a time
            asyncio.run(_cancellable(work.context, result))
    except BaseException as error:  # a SystemExit in a handler is its failure, not the worker's
        return _failure(work, error, began)
    finally:
        leave(token)
    return Outcome(work, State.SUCCEEDED, None, None, time.monotonic() - began)


async def _cancellable(context: JobContext, coroutine: Coroutine[Any, Any, Any]) -> None:
    """The coroutine, cancelled when its context is, from whatever thread."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if task.cancel():
            context.noticed = True

    def tell() -> None:
        with suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(cancel)

    context.on_cancel = tell
    if context.is_cancelled:
        cancel()
    try:
        await coroutine
    finally:
        context.on_cancel = None


async def execute_async(work: Work) -> Outcome:
    """``execute`` for a coroutine, in its own task."""
    began, call = time.monotonic(), _prepared(work)
    if isinstance(call, Outcome):
        return call
    token = enter(work.context)
    try:
        await call()
    except BaseException as error:  # CancelledError included: the loop knows why it cancelled
        return _failure(work, error, began)
    finally:
        leave(token)
    return Outcome(work, State.SUCCEEDED, None, None, time.monotonic() - began)


def _prepared(work: Work) -> Callable[[], Any] | Outcome:
    target = work.target
    assert target is not None
    try:
        payload = target.schema.decode(work.row.payload)
    except CorruptPayload as error:
        return Outcome(work, State.BLOCKED, Kind(error.code.value), summary_of(error), 0.0)
    return target.handler if target.schema.record is None else partial(target.handler, payload)


def _failure(work: Work, error: BaseException, began: float) -> Outcome:
    state, kind, delay, payload = State.PENDING, Kind.FAILED, None, None
    if isinstance(error, Bury):
        state, kind = State.DEAD, Kind.REJECTED
    elif isinstance(error, RetryLater):
        delay = wish(error.delay)
        payload = error.payload if isinstance(error, GoOn) else None
    elif isinstance(error, asyncio.CancelledError) and work.context.is_cancelled:
        # Where it stopped is no news: it did as it was told.
        log.warning("job %s %s was cancelled in attempt %d", work.context.id, work.row.target, work.row.attempt)
    else:
        # The log may say more than the row does (D10).
        name, attempt = work.row.target, work.row.attempt
        log.warning("job %s %s raised in attempt %d", work.context.id, name, attempt, exc_info=error)
        # One that was told to stop may have failed of just that: then it counts as any other, or is handed back.
        if work.target is not None and work.target.policy.one_try and not work.context.is_cancelled:
            state = State.DEAD
    return Outcome(work, state, kind, summary_of(error), time.monotonic() - began, delay, payload)
