"""The parts of the loop that need no database: its wait, its slots, the order of its end."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from dbqueue import events, ids
from dbqueue.database.tables import ClaimedRow
from dbqueue.errors import ConfigError, InvalidName, RetryLater
from dbqueue.payload import schema_of
from dbqueue.runtime.context import JobContext
from dbqueue.runtime.execute import Outcome, Work
from dbqueue.runtime.options import WorkerOptions
from dbqueue.runtime.processes import Current, Order
from dbqueue.runtime.slots import ThreadSlots
from dbqueue.runtime.stopping import Stopping
from dbqueue.runtime.wake import Wake
from dbqueue.states import Kind, OnCrash, State
from dbqueue.targets import Policy, Target
from tests.waiting import wait_for

# -- the wait ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def wake() -> Iterator[Wake]:
    wake = Wake()
    yield wake
    wake.close()


def _seconds(wake: Wake, patience: float = 5.0) -> float:
    began = time.monotonic()
    assert wake.wait(patience, None) is False
    return time.monotonic() - began


def test_a_ring_ends_the_wait_and_only_one(wake: Wake) -> None:
    for _ in range(3):
        wake.ring()
        wake.ring()
        assert _seconds(wake) < 1
        assert _seconds(wake, 0.02) >= 0.02


def test_a_ring_while_the_bell_is_being_reset_is_not_the_last_one_heard(
    wake: Wake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread rings between the two steps of the reset: for a fact that this wait's return will show. Later
    rings count too."""
    drain, rang = wake._reader, []

    class Reader:
        def fileno(self) -> int:
            return drain.fileno()

        def recv(self, size: int) -> bytes:
            wake.ring()
            data = drain.recv(size)
            wake.ring()
            rang.append(data)
            return data

        def close(self) -> None:
            drain.close()

    monkeypatch.setattr(wake, "_reader", Reader())
    wake.ring()
    assert _seconds(wake) < 1
    assert rang
    monkeypatch.setattr(wake, "_reader", drain)
    wake.wait(0, None)  # a byte of the ring in between may be left: one wait for nothing
    wake.ring()
    assert _seconds(wake) < 1


def test_no_ring_of_many_threads_is_lost(wake: Wake) -> None:
    """Each thread rings and waits until the loop has seen its fact; a lost ring would keep it waiting for the loop's
    next look."""
    facts: list[threading.Event] = []
    lock = threading.Lock()

    def ringer() -> None:
        for _ in range(300):
            seen = threading.Event()
            with lock:
                facts.append(seen)
            wake.ring()
            assert seen.wait(10)

    threads = [threading.Thread(target=ringer) for _ in range(4)]
    for thread in threads:
        thread.start()
    slowest, seen = 0.0, 0
    while seen < 1_200:
        slowest = max(slowest, _seconds(wake, 10))
        with lock:
            found, facts[:] = facts[:], []
        for fact in found:
            fact.set()
        seen += len(found)
    for thread in threads:
        thread.join(10)
    assert slowest < 5


def test_a_process_may_have_many_open_files() -> None:
    """select() fails from file number 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1_200:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1_200), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    try:
        wake = Wake()
        wake.ring()
        assert _seconds(wake) < 1
        wake.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thread_that_ends_after_the_worker_rings_nobody() -> None:
    """And above all not whoever has the closed file's number now."""
    wake = Wake()
    wake.close()
    reader, writer = os.pipe()
    wake.ring()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.close(reader)
    os.close(writer)


@pytest.mark.req("D14")
@pytest.mark.parametrize("first", ["order", "word"])
def test_a_child_hears_of_a_cancelled_job_whichever_pipe_is_read_first(first: str) -> None:
    """And not of another's, nor of an earlier claim of the same attempt, which was handed back when it was cancelled."""
    current, earlier, claim = Current(lambda beat: None), ids.new_token(), ids.new_token()
    order = Order("module", "attribute", "t", ids.new_id(), claim, 1, 3, b"")
    assert not current.begin(replace(order, claim=earlier)).is_cancelled
    current.cancel(earlier)
    context = current.begin(order)
    assert not context.is_cancelled
    current.cancel(earlier)
    assert not context.is_cancelled
    if first == "word":
        current.cancel(claim)
        assert current.begin(order).is_cancelled
    else:
        current.cancel(claim)
        assert context.is_cancelled


# -- slots -------------------------------------------------------------------------------------------------------------


def _work(handler: Callable[[], None]) -> Work:
    row = ClaimedRow(
        ids.new_id(), ids.new_token(), None, "t", b"", b"null", None, "default", 9, 0, 1, 0, 3, 1_000, 0, 0
    )
    policy = Policy(3, 1_000, "default", 0, OnCrash.RETRY, None)
    target: Target[Any] = Target("t", handler, schema_of(None, target="t"), policy, None)  # type: ignore[arg-type]
    return Work(row, target, JobContext(row.id, "t", 1, 3))


@pytest.fixture
def slots() -> Iterator[ThreadSlots]:
    slots = ThreadSlots(2, lambda: None)
    yield slots
    assert slots.close(5)


def _outcome(slots: ThreadSlots, handler: Callable[[], None]) -> Outcome:
    assert slots.start(_work(handler))
    return wait_for(slots.collect)[0]


def _raising(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


def _waiting(event: threading.Event) -> Callable[[], None]:
    def handler() -> None:
        event.wait(10)

    return handler


class BadText(RetryLater):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.req("D14")
@pytest.mark.parametrize(
    ("error", "summary", "delay"),
    [
        (SystemExit(3), "SystemExit", None),
        (KeyboardInterrupt(), "KeyboardInterrupt", None),
        (GeneratorExit(), "GeneratorExit", None),
        (RecursionError(), "RecursionError", None),
        (BadText(), "ValueError", None),
        (RetryLater("x", delay=1.5), "RetryLater: x", 1_500_000),
        (RetryLater("x", delay=-1), "RetryLater: x", 0),
        (RetryLater("x", delay=float("nan")), "RetryLater: x", None),
        (RetryLater("x", delay=float("inf")), "RetryLater: x", 3650 * 86_400 * 1_000_000),
        (RetryLater("x", delay=10**400), "RetryLater: x", 3650 * 86_400 * 1_000_000),
        (RetryLater("x", delay="5"), "RetryLater: x", None),  # type: ignore[arg-type]
        (RetryLater("x", delay=True), "RetryLater: x", None),
    ],
)
def test_whatever_a_handler_raises_is_an_outcome_and_the_slot_lives(
    slots: ThreadSlots, error: BaseException, summary: str, delay: int | None
) -> None:
    outcome = _outcome(slots, _raising(error))
    assert (outcome.state, outcome.kind, outcome.summary, outcome.delay) == (
        State.PENDING, Kind.FAILED, summary, delay,
    )  # fmt: skip
    assert slots.idle == 2
    for _ in range(3):
        assert _outcome(slots, lambda: None).state is State.SUCCEEDED


class Ended:
    """Slots, and the outcomes of what was started in them."""

    def __init__(self, size: int) -> None:
        self.rung = threading.Event()
        self.slots = ThreadSlots(size, self.rung.set)

    def run(self, *handlers: Callable[[], None]) -> None:
        for handler in handlers:
            assert self.slots.start(_work(handler))
        self.wait(len(handlers))

    def wait(self, count: int) -> None:
        until, outcomes = time.monotonic() + 10, list[Outcome]()
        while len(outcomes) < count and time.monotonic() < until:
            self.rung.wait(0.1)
            self.rung.clear()
            outcomes += self.slots.collect()
        assert [outcome.state for outcome in outcomes] == [State.SUCCEEDED] * count


@pytest.mark.req("D11")
def test_jobs_that_block_all_run_at_the_same_time() -> None:
    """However few threads short jobs get by with."""
    ended, all_there = Ended(20), threading.Barrier(20)

    def meet() -> None:
        all_there.wait(10)

    for _ in range(20):
        ended.run(*[meet] * 20)
    assert ended.slots.close(5)


@pytest.mark.req("D11")
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_job_behind_one_that_blocks_starts_at_once(size: int) -> None:
    """Also when the threads that were awake fall asleep at this very moment."""
    ended, go = Ended(size), threading.Event()
    assert ended.slots.start(_work(_waiting(go)))
    for _ in range(2_000):
        ended.run(*[lambda: None] * (size - 1))
    go.set()
    ended.wait(1)
    assert ended.slots.close(5)


@pytest.mark.req("D11")
def test_short_jobs_stay_in_warm_threads() -> None:
    ended = Ended(50)
    ended.run(*[lambda: None] * 50)  # makes the threads
    ran: Counter[int] = Counter()
    for _ in range(20):
        ended.run(*[lambda: ran.update([threading.get_ident()])] * 50)
    assert sum(count for _, count in ran.most_common(4)) > 500, "half of the jobs in four threads"
    assert ended.slots.close(5)


@pytest.mark.req("D14")
def test_slots_close_while_their_jobs_run() -> None:
    ended, go = Ended(4), threading.Event()
    for handler in (_waiting(go), _waiting(go), lambda: None):
        assert ended.slots.start(_work(handler))
    assert not ended.slots.close(0.05)
    go.set()
    ended.wait(3)
    assert ended.slots.close(5)


def test_an_abandoned_slot_comes_back_when_its_handler_does(slots: ThreadSlots) -> None:
    done = threading.Event()
    work = _work(_waiting(done))
    assert slots.start(work)
    slots.abandon(work)
    assert (slots.idle, slots.abandoned) == (1, 1)
    done.set()
    wait_for(lambda: slots.collect() or slots.idle == 2)
    assert slots.abandoned == 0


def test_without_new_threads_there_are_fewer_slots(slots: ThreadSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    assert slots.start(_work(_waiting(go)))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not slots.start(_work(lambda: None))
    assert (slots.size, slots.idle) == (1, 0)
    go.set()
    assert wait_for(slots.collect)
    assert slots.idle == 1


# -- the end -----------------------------------------------------------------------------------------------------------


def _stages(stop: Stopping, now: float) -> list[str]:
    return [
        name for name, due in (
            ("told", stop.told()), ("flag", stop.flag_due(now)), ("hand back", stop.hand_back_due(now)),
            ("leave", stop.leave_due(now)),
        ) if due
    ]  # fmt: skip


@pytest.mark.req("D19")
def test_the_order_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = Stopping()
    assert _stages(stop, now) == []
    assert stop.next_at == float("inf")
    stop.ask("SIGTERM", 30.0)
    assert stop.next_at == 0
    seen: list[tuple[float, str]] = []
    while not seen or seen[-1][1] != "leave":
        seen += [(now, stage) for stage in _stages(stop, now)]
        now = max(now, min(stop.next_at, now + 1000))
    assert seen == [(100.0, "told"), (130.0, "flag"), (131.0, "hand back"), (133.0, "leave")]
    assert _stages(stop, now + 1e9) == []


@pytest.mark.req("D19")
def test_asked_twice_it_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    stop = Stopping()
    stop.ask("SIGTERM", 30.0)
    assert _stages(stop, 100.0) == ["told"]
    stop.ask("SIGTERM", 30.0)
    assert stop.next_at == 0
    assert _stages(stop, 100.0) == ["flag"]
    assert stop.next_at == pytest.approx(100.1)
    assert _stages(stop, stop.next_at) == ["hand back"]


@pytest.mark.req("D19")
def test_an_end_of_its_own_making_is_not_the_first_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    stop = Stopping()
    stop.begin("too many slots", 30.0)
    assert _stages(stop, 100.0) == ["told"]
    stop.ask("SIGTERM", 5.0)
    assert _stages(stop, 104.0) == []
    assert stop.next_at == 105.0, "the earlier deadline"
    assert stop.reason == "too many slots"


# -- options, events ---------------------------------------------------------------------------------------------------


@pytest.mark.req("D17", "D18")
@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0}, {"slots": 1_001}, {"slots": True}, {"slots": 1.5}, {"max_jobs": 0}, {"max_jobs": "2"},
        {"shutdown": -1}, {"shutdown": float("nan")}, {"shutdown": float("inf")}, {"shutdown": "30"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WorkerOptions(**wrong).check()


def test_a_workers_name_keeps_the_rule_of_names() -> None:
    WorkerOptions(name="mail@host").check()
    with pytest.raises(InvalidName):
        WorkerOptions(name="").check()


def test_a_subscriber_that_raises_is_alone_in_it(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[events.Event] = []

    def raising(event: events.Event) -> None:
        raise ZeroDivisionError

    ends = [events.subscribe(raising), events.subscribe(heard.append)]
    try:
        events.emit(events.HistoryPruned(3))
    finally:
        for end in ends:
            end()
    assert heard == [events.HistoryPruned(3)]
    assert "HistoryPruned" in caplog.text
