"""The call sites: what a call writes, when it is to run, and what is refused before anything is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest

import dbqueue
from celery_bridge import Bridge, InvalidPayload, NotSupported, UnknownTarget, chain, chord, chunks, group
from dbqueue import DBQueue, InvalidArgument, InvalidName, InvalidTarget, TargetIsNotAValue
from tests.runtimes.lab import drained, record

UTC = timezone.utc


class Tasks:
    """What ran is in ``seen``."""

    def __init__(self, bridge: Bridge) -> None:
        self.seen: list[Any] = []

        @bridge.task(name="add", queue="sums", priority=3)
        def add(x: int, y: int = 2, *rest: int, **named: Any) -> int:
            self.seen.append((x, y, *rest, named) if rest or named else (x, y))
            return x + y

        @bridge.task(name="tell", bind=True)
        def tell(self_: Any) -> None:
            self.seen.append(self_.request)

        @bridge.task(name="brief", expires=60)
        def brief() -> None:
            self.seen.append("brief")

        self.add: Any = add
        self.tell: Any = tell
        self.brief: Any = brief


@pytest.fixture
def tasks(bridge: Bridge) -> Tasks:
    return Tasks(bridge)


def advance(queue: DBQueue, seconds: float) -> None:
    queue.database.clock.advance(seconds)


@pytest.mark.req("C8")
def test_a_call_is_a_job_of_its_target(queue: DBQueue, tasks: Tasks) -> None:
    result = tasks.add.delay(1, y=5)
    job = record(queue, result.job_id)
    assert (job.target, job.queue, job.priority, job.task_id) == ("add", "sums", 3, result.id)
    assert (job.timeout, job.max_attempts, job.state) == (30.0, 20, "pending")
    assert (result.id, result.state, result.ready()) == (str(job.id), "PENDING", False)
    drained(queue)
    assert tasks.seen == [(1, 5)]
    assert (result.state, result.status, result.successful(), result.failed()) == ("SUCCESS", "SUCCESS", True, False)


@pytest.mark.req("C8")
def test_any_json_value_comes_back_equal(queue: DBQueue, tasks: Tasks) -> None:
    values = [None, True, -(1 << 63), 1.0, 1e300, "ü\x00", [1, [2.5, {}]], {"a": {"b": [None]}, "": False}]
    tasks.add.apply_async((values, "y", 3), {"named": values})
    tasks.add.apply_async([(1, (2,))], {"y": {"k": (3,)}})
    drained(queue, slots=1)
    assert tasks.seen == [(values, "y", 3, {"named": values}), ([1, [2]], {"k": [3]})], "a tuple comes back as a list"
    assert [type(a) for a in tasks.seen[0][0]] == [type(a) for a in values]


@pytest.mark.req("C8")
def test_the_request_says_what_the_call_said(queue: DBQueue, tasks: Tasks) -> None:
    sent = tasks.tell.apply_async(
        task_id="mine", headers={"trace": "t1", "n": [1]}, queue="other", priority=7, expires=600, time_limit=20, soft_time_limit=9.5
    )  # fmt: skip
    job = record(queue, sent.job_id)
    assert (job.queue, job.priority, job.task_id, job.timeout, sent.id) == ("other", 7, "mine", 20.0, "mine")
    drained(queue, queues=("other",))
    request = tasks.seen[0]
    assert (request.id, request.root_id, request.task, request.args, request.kwargs) == ("mine", "mine", "tell", [], {})
    assert (request.headers, request.trace, request.get("n"), request.get("m", 5)) == (
        {"trace": "t1", "n": [1]}, "t1", [1], 5,
    )  # fmt: skip
    assert request.delivery_info == {"exchange": "", "routing_key": "other", "priority": 7, "redelivered": False}
    assert (request.retries, request.called_directly, request.is_eager) == (0, False, False)
    assert tuple(request.timelimit) == (20, 9.5)
    assert request.hostname
    assert datetime.fromisoformat(request.expires) > datetime.now(UTC)
    plain = tasks.tell.delay()
    drained(queue)
    assert (tasks.seen[1].id, tasks.seen[1].timelimit) == (plain.id, (30.0, None))
    assert tasks.seen[1].delivery_info["routing_key"] == "default"
    assert not tasks.tell.request.id
    assert tasks.tell.request.called_directly, "outside of a run"


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.req("C8")
def test_countdown_waits_in_the_database(queue: DBQueue, tasks: Tasks) -> None:
    tasks.add.apply_async((1,), countdown=90.5)
    tasks.add.apply_async((2,), countdown=-5)
    drained(queue)
    assert tasks.seen == [(2, 2)], "what is past is due"
    advance(queue, 90)
    drained(queue)
    assert len(tasks.seen) == 1
    advance(queue, 1)
    drained(queue)
    assert tasks.seen == [(2, 2), (1, 2)]


@pytest.mark.req("C8")
@pytest.mark.parametrize(
    ("eta", "zone", "meant"),
    [
        (datetime(2031, 7, 1, 12, tzinfo=timezone(timedelta(hours=5))), "Europe/Berlin", datetime(2031, 7, 1, 7, tzinfo=UTC)),
        (datetime(2031, 7, 1, 12), "UTC", datetime(2031, 7, 1, 12, tzinfo=UTC)),  # noqa: DTZ001
        (datetime(2031, 7, 1, 12), "Europe/Berlin", datetime(2031, 7, 1, 10, tzinfo=UTC)),  # noqa: DTZ001
        (datetime(2031, 1, 1, 12), "Europe/Berlin", datetime(2031, 1, 1, 11, tzinfo=UTC)),  # noqa: DTZ001
        ("2031-07-01T12:00:00.5", "UTC", datetime(2031, 7, 1, 12, 0, 0, 500_000, tzinfo=UTC)),
        ("2031-07-01T12:00:00Z", "Europe/Berlin", datetime(2031, 7, 1, 12, tzinfo=UTC)),
        ("2031-07-01T12:00:00+02:00", "UTC", datetime(2031, 7, 1, 10, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_eta(queue: DBQueue, eta: Any, zone: str, meant: datetime) -> None:
    """Without a zone it is meant in the bridge's."""
    tasks = Tasks(Bridge(queue, timezone=zone))
    assert record(queue, tasks.add.apply_async((1,), eta=eta).job_id).run_at == meant


@pytest.mark.req("C8")
def test_what_has_expired_is_never_begun(queue: DBQueue, tasks: Tasks) -> None:
    now = datetime.now(UTC)
    late = [
        tasks.add.apply_async((1,), expires=50),
        tasks.add.apply_async((2,), expires=now + timedelta(seconds=50)),
        tasks.add.apply_async((3,), expires=now - timedelta(seconds=1)),
        tasks.add.apply_async((4,), countdown=70, expires=50),
        tasks.brief.delay(),
    ]
    early = [tasks.add.apply_async((5,), expires=100), tasks.brief.apply_async(expires=None)]
    advance(queue, 75)
    drained(queue)
    assert sorted(map(str, tasks.seen)) == ["(5, 2)", "brief"]
    assert [result.state for result in late] == ["REVOKED"] * 5
    assert {record(queue, result.job_id).error_kind for result in late} == {"expired"}
    assert [result.state for result in early] == ["SUCCESS"] * 2


@pytest.mark.req("C8")
def test_larger_priorities_first(queue: DBQueue, tasks: Tasks) -> None:
    for priority in (0, 9, None, 5):
        tasks.add.apply_async((priority,), priority=priority)
    drained(queue, slots=1)
    assert [x for x, _ in tasks.seen] == [9, 5, None, 0]


@pytest.mark.req("C8", "D8")
def test_a_task_id_may_be_used_twice_and_a_key_may_not(queue: DBQueue, tasks: Tasks) -> None:
    first, second = (tasks.add.apply_async((n,), task_id="same") for n in (1, 2))
    assert first.job_id != second.job_id
    assert tasks.add.AsyncResult("same").job_id == second.job_id
    assert tasks.add.AsyncResult("other").state == "PENDING"
    assert (tasks.add.AsyncResult("other").job_id, tasks.tell.AsyncResult("same").job_id) == (None, None)
    once, again = (tasks.add.apply_async((3,), key="order:7") for _ in range(2))
    assert (once.duplicate, again.duplicate, again.job_id) == (False, True, once.job_id)
    drained(queue)
    assert sorted(tasks.seen) == [(1, 2), (2, 2), (3, 2)]


# -- in the caller's transaction ---------------------------------------------------------------------------------------


@contextmanager
def connection(url: str) -> Iterator[Any]:
    opened: Any = sqlite3.connect(url.removeprefix("sqlite:///")) if url.startswith("sqlite") else psycopg.connect(url)
    with closing(opened):
        opened.execute("CREATE TABLE orders (id integer)")
        opened.commit()
        yield opened


@pytest.mark.req("C8", "D5")
def test_a_call_commits_with_the_callers_rows_or_not_at_all(queue: DBQueue, tasks: Tasks, database_url: str) -> None:
    with connection(database_url) as own:
        for end in (own.rollback, own.commit):
            own.execute("INSERT INTO orders VALUES (1)")
            with dbqueue.using(own):
                result = tasks.add.s(1).apply_async(countdown=0, task_id="t")
                assert (result.state, record(queue, result.job_id).task_id) == ("PENDING", "t")
            end()
        assert own.execute("SELECT count(*) FROM orders").fetchone()[0] == 1
    drained(queue)
    assert tasks.seen == [(1, 2)]


# -- refused before anything is written --------------------------------------------------------------------------------


class Article:
    __table__ = "articles"  # as an ORM model has it


class Word(str):
    pass


REFUSED: list[tuple[Callable[[Tasks, Bridge], object], type[Exception], str]] = [
    # arguments
    (lambda t, b: t.add.delay(), TypeError, "add(): missing a required argument: 'x'"),
    (lambda t, b: t.tell.delay(1), TypeError, "tell(): too many positional arguments"),
    (lambda t, b: t.add.delay(1, x=2), TypeError, "add(): multiple values for argument 'x'"),
    (lambda t, b: t.brief.apply_async(kwargs={"z": 1}), TypeError, "brief(): got an unexpected keyword argument 'z'"),
    (lambda t, b: t.tell.s(5).delay(), TypeError, "tell(): too many positional arguments"),
    (lambda t, b: t.add.delay(Article()), InvalidPayload, "target 'add': argument 'x': an ORM model; give its id"),
    (lambda t, b: t.add.delay(1, [{"a": Decimal(7)}]), InvalidPayload, "argument 'y[]{}': needs None, bool, int, float, str, or a list"),
    (lambda t, b: t.add.delay(1, 2, 3, {4}), InvalidPayload, "argument '*rest': needs None"),
    (lambda t, b: t.add.delay(1, zip_code={5: 1}), InvalidPayload, "argument 'zip_code{}': needs str, got int"),
    (lambda t, b: t.add.delay(float("nan")), InvalidPayload, "argument 'x': needs a finite float"),
    (lambda t, b: t.add.delay(1 << 63), InvalidPayload, "argument 'x': needs an int of 64 bits"),
    (lambda t, b: t.add.delay(Word("w")), InvalidPayload, "argument 'x': needs None"),
    (lambda t, b: t.add.delay(b"bytes"), InvalidPayload, "got bytes"),
    (lambda t, b: t.add.delay("x" * (1 << 20)), InvalidPayload, "the limit is 1048576"),
    (lambda t, b: t.add.apply_async((1,), headers={"a": object()}), InvalidPayload, "argument 'headers{}': needs None"),
    (lambda t, b: t.add.delay(t.tell), TargetIsNotAValue, "argument 'x': a job target is not a value"),
    (lambda t, b: t.add.delay([t.tell.s()]), TargetIsNotAValue, "argument 'x[]': a job target is not a value"),
    # options
    (lambda t, b: t.add.apply_async((1,), countdwn=3), InvalidArgument, "has no option 'countdwn'. The nearest known name is countdown."),
    (lambda t, b: t.add.s(1).set(quue="q"), InvalidArgument, "The nearest known name is queue."),
    (lambda t, b: t.add.apply_async((1,), countdown=3, eta=datetime.now(UTC)), InvalidArgument, "give countdown or eta, not both"),
    (lambda t, b: t.add.apply_async((1,), countdown="3"), InvalidArgument, "countdown must be a number of seconds"),
    (lambda t, b: t.add.apply_async((1,), countdown=1e12), InvalidArgument, "countdown must be a number of seconds"),
    (lambda t, b: t.add.apply_async((1,), eta="tomorrow"), InvalidArgument, "eta is no date and time in ISO format"),
    (lambda t, b: t.add.apply_async((1,), eta=5), InvalidArgument, "eta must be a datetime"),
    (lambda t, b: t.add.apply_async((1,), expires=True), InvalidArgument, "expires must be a number of seconds"),
    (lambda t, b: t.add.apply_async((1,), priority=10), InvalidTarget, "priority must be"),
    (lambda t, b: t.add.apply_async((1,), queue=""), InvalidName, "queue name must have 1 to 200 characters"),
    (lambda t, b: t.add.apply_async((1,), task_id=5), InvalidArgument, "task_id must be a str"),
    (lambda t, b: t.add.apply_async((1,), task_id="a\nb"), InvalidArgument, "task_id must be a str"),
    (lambda t, b: t.add.apply_async((1,), time_limit=4000), InvalidTarget, "timeout must be a number from 0.001 to 3600"),
    (lambda t, b: t.add.apply_async((1,), soft_time_limit=31), InvalidArgument, "soft_time_limit must not be above time_limit"),
    (lambda t, b: t.add.apply_async((1,), time_limit=5, soft_time_limit=6), InvalidArgument, "6 is above 5"),
    # what cannot be kept
    *[
        (lambda t, b, option=option: t.add.apply_async((1,), **option), NotSupported, f"task 'add': {next(iter(option))}=")
        for option in (
            {"link": "sig"}, {"link_error": ["sig"]}, {"chain": ["sig"]}, {"chord": "sig"}, {"group_id": "g"}, {"shadow": "s"},
            {"ignore_result": False}, {"serializer": "pickle"}, {"routing_key": "r"}, {"exchange": "e"}, {"compression": "zlib"},
            {"producer": 1}, {"reply_to": "r"}, {"stamped_headers": ["a"]}, {"delivery_mode": 1},
        )
    ],
    (lambda t, b: t.add.s(1) | t.add.s(2), NotSupported, "canvas cannot be kept durable here"),
    (lambda t, b: t.add.s(1).link(t.add.s(2)), NotSupported, "canvas"),
    (lambda t, b: t.add.map([1]), NotSupported, "canvas"),
    (lambda t, b: t.add.chunks([1], 2), NotSupported, "canvas"),
    (lambda t, b: group([t.add.s(1)]), NotSupported, "group: canvas"),
    (lambda t, b: chain(t.add.s(1), t.add.s(2)), NotSupported, "chain: canvas"),
    (lambda t, b: chord([t.add.s(1)])(t.add.s(2)), NotSupported, "chord: canvas"),
    (lambda t, b: chunks(t.add, [1], 2), NotSupported, "chunks: canvas"),
    (lambda t, b: t.add.update_state(state="X"), NotSupported, "states of one's own are not stored"),
    # names
    (lambda t, b: b.send_task("addd", (1,)), UnknownTarget, "no task 'addd' is declared on this Bridge; there is 'add'"),
    (lambda t, b: b.signature("x"), UnknownTarget, "no task 'x' is declared on this Bridge"),
]  # fmt: skip


@pytest.mark.req("C8", "D3", "D10")
def test_nothing_is_written_for_a_call_that_is_refused(queue: DBQueue, bridge: Bridge, tasks: Tasks) -> None:
    for call, error, told in REFUSED:
        with pytest.raises(error) as caught:
            call(tasks, bridge)
        assert told in str(caught.value)
        assert type(caught.value) is error
        assert "Decimal('7')" not in str(caught.value)
    own: list[Any] = []
    own.append(own)
    with pytest.raises(InvalidPayload, match="nested too deeply, or in itself"):
        tasks.add.delay(own)
    assert queue.jobs() == []


@pytest.mark.req("C8")
def test_options_that_ask_for_nothing_or_for_what_is_so_anyhow(queue: DBQueue, tasks: Tasks) -> None:
    tasks.add.apply_async(
        (1,), link=None, link_error=[], shadow=None, serializer="json", ignore_result=True, retry=True, retry_policy={"max_retries": 3},
        delivery_mode=2, add_to_parent=False, eta=None, expires=None, priority=None, queue=None, task_id=None, headers=None,
    )  # fmt: skip
    drained(queue)
    assert tasks.seen == [(1, 2)]


# -- later, and by name ------------------------------------------------------------------------------------------------


@pytest.mark.req("C8")
def test_signatures(queue: DBQueue, bridge: Bridge, tasks: Tasks) -> None:
    partial = tasks.add.s(2, y=5).set(queue="other", countdown=100)
    assert (partial.task, partial.args, partial.kwargs) == ("add", (2,), {"y": 5})
    assert record(queue, partial.delay().job_id).queue == "other"
    now = partial.clone((), {"y": 6}, countdown=None)
    sent = [
        now.delay(),  # 2, 6
        tasks.add.s(7).delay(1),  # 1, 7: the call's come first
        tasks.add.si(3).delay(9, y=9),  # 3, 2: immutable
        tasks.add.si(4).clone((9,)).delay(),  # 4, 2
        tasks.add.signature((5,), {"y": 8}, {"priority": 9}).apply_async(),
        tasks.add.s(1).apply_async((8,), {"named": 1}),
        bridge.signature("add", (6,), queue="other").delay(),
        bridge.send_task("add", (10,), {"y": 0}),
    ]
    assert record(queue, sent[4].job_id).priority == 9
    drained(queue, queues=("sums", "other"), slots=1)
    expected = [(5, 8), (2, 6), (6, 2), (1, 7), (3, 2), (4, 2), (8, 1, {"named": 1}), (10, 0)]
    assert sorted(map(str, tasks.seen)) == sorted(map(str, expected))
    assert partial.kwargs == {"y": 5}, "a call changes none"
    assert "5" not in repr(partial)
    assert (tasks.add.s(1)(2), tasks.add.si(1).apply((9,)).get()) == (3, 3)


@pytest.mark.req("C8", "D3")
def test_a_schedule_takes_a_signatures_payload(queue: DBQueue, tasks: Tasks) -> None:
    queue.schedule("sums", "0 3 * * *", tasks.add.target, tasks.add.s(1, y=9).payload)
    queue.run_schedule("sums")
    queue.schedule("told", "0 3 * * *", tasks.tell.target, tasks.tell.s().payload)
    job = queue.run_schedule("told")
    with pytest.raises(TypeError, match=r"add\(\): missing a required argument: 'x'"):
        queue.schedule("sums", "0 3 * * *", tasks.add.target, tasks.add.s().payload)
    with pytest.raises(InvalidPayload, match=r"give task\.s\(\.\.\.\)\.payload"):
        queue.schedule("sums", "0 3 * * *", tasks.add.target, {"x": 1})
    drained(queue)
    assert tasks.seen[0] == (1, 9) or tasks.seen[1] == (1, 9)
    assert tasks.tell.AsyncResult(str(job.id)).state == "SUCCESS"
    assert tasks.add.AsyncResult(str(job.id)).job_id is None, "another task's"
    request = next(seen for seen in tasks.seen if seen != (1, 9))
    assert (request.id, request.delivery_info["routing_key"]) == (str(job.id), "default")


@pytest.mark.req("C8")
def test_a_result_has_an_id_and_a_state_and_nothing_to_get(queue: DBQueue, tasks: Tasks) -> None:
    result = tasks.add.delay(1)
    for ask in (result.get, result.wait, lambda: result.result, lambda: result.traceback, lambda: result.info):
        with pytest.raises(NotSupported, match=r"what a task returns is not stored, so there is nothing to get"):
            ask()
    with pytest.raises(NotSupported, match=r"queue\.cancel\(result\.job_id\)"):
        result.revoke()
    queue.cancel(result.job_id)
    assert (result.state, result.ready(), str(result)) == ("REVOKED", True, result.id)
    assert isinstance(result.job_id, UUID)
