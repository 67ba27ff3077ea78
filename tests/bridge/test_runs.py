"""What becomes of a run: retries on the same row, errors, crashes, and calls of older code."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_bridge import Bridge, Ignore, MaxRetriesExceededError, NotSupported, Reject, Retry
from dbqueue import Bury, DBQueue, RetryLater, current_job
from tests.bridge.lab import outcome
from tests.factory import claim_turn, set_columns
from tests.runtimes.lab import drained, in_thread, record
from tests.waiting import wait_for

Seen = list[Any]


class Boom(Exception):
    pass


def run_all(queue: DBQueue, times: int = 10) -> None:
    """Runs what is due, and then what becomes due within the next hour, so often."""
    for _ in range(times):
        drained(queue)
        queue.database.clock.advance(3600)


@pytest.mark.req("C8", "D12")
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_retries_are_counted_as_celery_counts_them(queue: DBQueue, bridge: Bridge, limit: int) -> None:
    seen: Seen = []

    @bridge.task(bind=True, max_retries=limit, default_retry_delay=10)
    def fail(self: Any, n: int) -> None:
        assert not self.request.delivery_info["redelivered"]
        seen.append((self.request.retries, self.request.id, self.request.args, self.request.headers))
        raise self.retry(exc=Boom("secret"))

    result = fail.apply_async((1,), headers={"h": 1}, task_id="t", key="k")
    drained(queue)
    waiting = record(queue, result.job_id)
    if limit:
        assert outcome(waiting) == ("pending", "failed", f"Retry: 1 of {limit} after Boom")
        assert result.state == "RETRY"
        run_at = waiting.run_at - waiting.updated_at
        assert run_at == timedelta(seconds=10)
        drained(queue)
        assert len(seen) == 1, "not before its time"
    run_all(queue)
    assert seen == [(retries, "t", [1], {"h": 1}) for retries in range(limit + 1)]
    end = record(queue, result.job_id)
    assert (*outcome(end), end.attempt, end.key, end.task_id) == ("dead", "failed", "Boom", limit + 1, "k", "t")
    assert (result.state, queue.counts()) == ("FAILURE", {"dead": 1})


@pytest.mark.req("C8", "D1")
def test_max_retries_of_none_is_for_ever(queue: DBQueue, bridge: Bridge) -> None:
    """Beyond the hundred attempts that a target may have."""
    seen: Seen = []

    @bridge.task(bind=True, max_retries=None, default_retry_delay=0, max_crashes=1)
    def often(self: Any) -> None:
        seen.append(self.request.retries)
        if self.request.retries < 120:
            self.retry()

    result = often.delay()
    drained(queue)
    assert seen == list(range(121))
    end = record(queue, result.job_id)
    assert (end.state, end.attempt, end.max_attempts) == ("succeeded", 121, 121)


def _swallowed(task: Any) -> None:
    with suppress(Retry):
        task.retry(countdown=5)


def _not_thrown(task: Any) -> None:
    again = task.retry(countdown=5, throw=False)
    assert isinstance(again, Retry)
    assert again.when == 5


def _not_thrown_and_failed(task: Any) -> None:
    task.retry(countdown=5, throw=False)
    raise Boom


def _at(task: Any) -> None:
    task.retry(eta=datetime.now(timezone.utc) + timedelta(seconds=5))


@pytest.mark.req("C8")
@pytest.mark.parametrize("way", [_swallowed, _not_thrown, _not_thrown_and_failed, _at])
def test_a_retry_counts_however_the_task_ends(queue: DBQueue, bridge: Bridge, way: Callable[[Any], None]) -> None:
    seen: Seen = []

    @bridge.task(bind=True)
    def once(self: Any) -> None:
        seen.append(self.request.retries)
        if not self.request.retries:
            way(self)

    result = once.delay()
    drained(queue)
    queue.database.clock.advance(4)
    drained(queue)
    assert (seen, result.state) == ([0], "RETRY")
    queue.database.clock.advance(2)
    drained(queue)
    assert (seen, result.state) == ([0, 1], "SUCCESS")


@pytest.mark.req("C8")
def test_a_retry_may_have_other_arguments_but_is_the_same_job(queue: DBQueue, bridge: Bridge) -> None:
    seen: Seen = []

    @bridge.task(bind=True, default_retry_delay=0, max_retries=9)
    def walk(self: Any, step: int, *, far: bool = False) -> None:
        seen.append((step, far))
        if step == 0:
            self.retry(args=(1,))
        if step == 1:
            self.retry(kwargs={"step": 2, "far": True})
        if step == 2:
            self.retry(args=(3,), max_retries=9)
        if step == 3:
            for option in ({"queue": "q"}, {"priority": 1}, {"expires": 5}, {"task_id": "x"}, {"time_limit": 4}):
                with pytest.raises(NotSupported, match=f"keeps its {next(iter(option))}"):
                    self.retry(**option)
            with pytest.raises(TypeError):
                self.retry(args=(1, 2, 3))
            self.retry(args=(Boom(),))

    result = walk.delay(step=0)
    drained(queue)
    assert seen == [(0, False), (1, False), (2, True), (3, True)]
    assert outcome(record(queue, result.job_id)) == ("dead", "failed", "InvalidPayload")


@pytest.mark.req("C8", "D10")
def test_after_the_last_retry_without_an_exception_of_its_own(queue: DBQueue, bridge: Bridge) -> None:
    raised: Seen = []

    @bridge.task(bind=True, max_retries=0)
    def fail(self: Any, secretive: str) -> None:
        try:
            self.retry()
        except MaxRetriesExceededError as error:
            raised.append(error)
            raise

    result = fail.delay("hunter2")
    drained(queue)
    assert outcome(record(queue, result.job_id)) == ("dead", "failed", "MaxRetriesExceededError")
    assert "hunter2" not in str(raised[0])


@pytest.mark.req("C8")
def test_autoretry(queue: DBQueue, bridge: Bridge) -> None:
    seen: Seen = []

    @bridge.task(
        bind=True, name="auto", autoretry_for=(ArithmeticError, LookupError), dont_autoretry_for=(KeyError,), retry_backoff=3,
        retry_backoff_max=10, retry_jitter=False, max_retries=4,
    )  # fmt: skip
    def auto(self: Any, kind: str) -> None:
        seen.append(self.request.retries)
        raise {"zero": ZeroDivisionError, "key": KeyError, "boom": Boom}[kind]

    @bridge.task(name="any", autoretry_for=(Exception,))
    def any_error() -> None:
        raise Bury

    @bridge.task(name="plain", autoretry_for=(Boom,), retry_kwargs={"max_retries": 1, "countdown": 7})
    def plain() -> None:
        raise Boom

    job = auto.delay("zero").job_id
    waits = []
    for _ in range(4):
        drained(queue)
        waiting = record(queue, job)
        waits.append((waiting.run_at - waiting.updated_at).total_seconds())
        queue.database.clock.advance(3600)
    drained(queue)
    assert waits == [3, 6, 10, 10]
    assert (seen, outcome(record(queue, job))[2]) == ([0, 1, 2, 3, 4], "ZeroDivisionError")
    ends = [auto.delay(kind).job_id for kind in ("key", "boom")] + [any_error.delay().job_id]
    other = plain.delay().job_id
    drained(queue)
    assert [outcome(record(queue, end))[:2] for end in ends] == [
        ("dead", "failed"), ("dead", "failed"), ("dead", "rejected"),
    ]  # fmt: skip
    waiting = record(queue, other)
    assert outcome(waiting) == ("pending", "failed", "Retry: 1 of 1 after Boom")
    assert waiting.run_at - waiting.updated_at == timedelta(seconds=7)


@pytest.mark.req("C8", "D10")
@pytest.mark.parametrize(
    ("raised", "end", "again"),
    [
        (Boom("secret"), ("dead", "failed", "Boom"), False),
        (SystemExit(3), ("dead", "failed", "SystemExit"), False),
        (Ignore("secret"), ("succeeded", None, None), False),
        (Reject("secret"), ("dead", "rejected", "Bury: rejected: str"), False),
        (Reject(Boom("secret")), ("dead", "rejected", "Bury: rejected: Boom"), False),
        (Reject(requeue=True), ("succeeded", None, None), True),
        (Bury("told"), ("dead", "rejected", "Bury: told"), False),
        (RetryLater("told", delay=0), ("succeeded", None, None), True),
    ],
)
def test_what_a_task_raises(queue: DBQueue, bridge: Bridge, raised: Any, end: Any, again: bool) -> None:
    """An error ends the job, as with Celery; nothing of its text is stored."""
    seen: Seen = []

    @bridge.task(bind=True)
    def act(self: Any) -> None:
        seen.append(self.request.delivery_info["redelivered"])
        if len(seen) == 1:
            raise raised

    result = act.delay()
    run_all(queue, 2)
    assert outcome(record(queue, result.job_id)) == end
    assert seen == ([False, True] if again else [False])


@pytest.mark.req("C8", "D12")
def test_a_crash_costs_an_attempt_and_no_retry(queue: DBQueue, bridge: Bridge) -> None:
    seen: Seen = []

    @bridge.task(bind=True, max_retries=1, max_crashes=3, default_retry_delay=0)
    def act(self: Any) -> None:
        seen.append((self.request.retries, self.request.delivery_info["redelivered"]))
        self.retry(exc=Boom())

    def crash() -> None:
        """Claims the job and forgets it."""
        with queue.database.session() as session:
            assert queue.database.dialect.turn(session, claim_turn()).claimed
            queue.database.clock.advance(3600)
            queue.database.dialect.upkeep(session, 10, ("default",))

    job = act.delay().job_id
    crash()
    drained(queue, max_jobs=1)
    assert outcome(record(queue, job)) == ("pending", "failed", "Retry: 1 of 1 after Boom")
    crash()
    drained(queue)
    assert seen == [(0, True), (1, True)]
    assert outcome(record(queue, job)) == ("dead", "failed", "Boom")
    job = act.delay().job_id
    for state in ("pending", "pending", "dead"):
        crash()
        found = record(queue, job)
        assert (found.state, found.error_kind) == (state, "crashed")


@pytest.mark.req("C8", "D19")
def test_an_error_of_a_task_that_was_told_to_stop_does_not_end_its_job(queue: DBQueue, bridge: Bridge) -> None:
    began = threading.Event()

    @bridge.task
    def act() -> None:
        job = current_job()
        assert job is not None
        began.set()
        wait_for(lambda: job.is_cancelled)
        raise Boom

    result = act.delay()
    with in_thread(queue, shutdown=0.0) as worker:
        assert began.wait(10)
        worker.stop()
        worker.ended()
    assert result.state in ("PENDING", "RETRY")
    assert record(queue, result.job_id).state == "pending"


@pytest.mark.req("C8")
def test_a_dead_job_that_is_retried_by_hand_keeps_its_count(queue: DBQueue, bridge: Bridge) -> None:
    seen: Seen = []

    @bridge.task(bind=True, max_retries=1, default_retry_delay=0)
    def act(self: Any) -> None:
        seen.append(self.request.retries)
        self.retry(exc=Boom())

    job = act.delay().job_id
    assert job is not None
    drained(queue)
    queue.retry(job)
    drained(queue)
    assert (seen, record(queue, job).state) == ([0, 1, 1], "dead")


# -- calls of older code -----------------------------------------------------------------------------------------------


def old(first: int, second: int = 2) -> None: ...


def renamed(one: int, two: int = 2) -> None: ...


def grown(first: int, second: int = 2, third: int = 3, *, fourth: int = 4) -> None: ...


def starred(*args: int, **kwargs: int) -> None: ...


def shrunk(first: int) -> None: ...


def swapped(second: int, first: int) -> None: ...


def pushed(zeroth: int, first: int = 1, second: int = 2) -> None: ...


def beheaded(second: int) -> None: ...


def demanding(first: int, second: int, third: int) -> None: ...


def keyword_only(new: int, *, first: int = 0) -> None: ...


@pytest.mark.req("C8", "D9")
@pytest.mark.parametrize(
    ("now", "args", "kwargs", "fits"),
    [
        (old, [1], {}, True),
        (renamed, [1, 2], {}, True),
        (renamed, [1], {"second": 2}, False),
        (grown, [1], {"second": 5}, True),
        (starred, [1], {"second": 5}, True),
        (shrunk, [1], {}, True),
        (shrunk, [1, 2], {}, False),
        (shrunk, [1], {"second": 2}, False),
        (swapped, [1, 2], {}, False),
        (swapped, [], {"first": 1, "second": 2}, True),
        (pushed, [1], {}, False),
        (beheaded, [1], {}, False),
        (demanding, [1, 2], {}, False),
        (keyword_only, [1], {}, False),
    ],
)
def test_a_call_that_no_longer_fits_is_blocked(
    make_queue: Callable[..., DBQueue], now: Callable[..., None], args: Any, kwargs: Any, fits: bool
) -> None:
    then = Bridge(make_queue(), shared=False).task(name="t")(old)
    result = then.apply_async(args, kwargs)
    queue, ran = make_queue(), []

    def body(*given: Any, **named: Any) -> None:
        ran.append((list(given), named))

    body.__signature__ = inspect.signature(now)  # type: ignore[attr-defined]
    Bridge(queue, shared=False).task(name="t")(body)
    drained(queue)
    found = record(queue, result.job_id)
    assert outcome(found) == (("succeeded", None, None) if fits else ("blocked", "schema_mismatch", "SchemaMismatch"))
    assert ran == ([(args, kwargs)] if fits else [])
    assert result.state == ("SUCCESS" if fits else "BLOCKED")
    if not fits:  # the old code comes back
        assert found.attempt == 0
        queue.retry(found.id)
        drained(then.target._writer)
        assert result.state == "SUCCESS"


@pytest.mark.req("C8", "D9")
@pytest.mark.parametrize("stored", [b"{", b"[]", b'{"args": 1, "kwargs": {}, "names": []}', b"\xff"])
def test_a_corrupt_call_is_blocked(queue: DBQueue, bridge: Bridge, stored: bytes) -> None:
    ran: Seen = []

    @bridge.task
    def act() -> None:
        ran.append(1)

    job = act.delay().job_id
    assert job is not None
    set_columns(queue.database, job.bytes, payload=stored)
    drained(queue)
    assert outcome(record(queue, job)) == ("blocked", "corrupt_payload", "CorruptPayload")
    assert not ran


def test_the_form_of_a_stored_call(queue: DBQueue, bridge: Bridge) -> None:
    """Jobs outlive the code that wrote them: whatever is added here, this must be read for ever."""

    @bridge.task
    def act(x: int, *, y: int = 0) -> None: ...

    job = act.apply_async(
        (1,), {"y": 2}, task_id="t", headers={"a": 1}, priority=4, queue="q", soft_time_limit=5
    ).job_id
    assert job is not None
    found = queue.get_job(job, with_payload=True)
    assert found is not None
    assert json.loads(found.payload or b"") == {
        "args": [1], "kwargs": {"y": 2}, "names": ["x"], "task_id": "t", "headers": {"a": 1}, "priority": 4, "queue": "q",
        "limits": [None, 5],
    }  # fmt: skip
    assert found.fingerprint == "fd809eb5b6748c1396bfe52e177429e2f286a51ffa97f55a473bb72ebdd4ce83"
