"""Declarations and what needs no database: what is refused, running here and now, and whose the shared tasks are."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_bridge import Bridge, Ignore, MaxRetriesExceededError, NotSupported, Reject, Retry, Task, shared_task
from dbqueue import ConfigError, DBQueue, InvalidName, InvalidTarget, ReservedName, TargetIsNotAValue
from dbqueue.runtime.worker import Worker, WorkerOptions


def plain(x: int) -> int:
    return x + 1


def generator() -> Any:
    yield 1


async def coroutine() -> None: ...


def login(name: str, password: str) -> None: ...


def about(password_id: int, has_token: bool, max_tokens: int) -> None: ...


def no_self() -> None: ...


@pytest.fixture
def bridge() -> Bridge:
    return Bridge(DBQueue())


REFUSED: list[tuple[dict[str, Any], Any, type[Exception], str]] = [
    ({}, generator, InvalidTarget, "a generator or a coroutine function"),
    ({}, coroutine, InvalidTarget, "a generator or a coroutine function"),
    ({}, Bridge, InvalidTarget, "a task is a plain function; got type"),
    ({}, login, InvalidTarget, "login': parameter 'password' names a secret, and arguments are stored; give the id"),
    ({"bind": True}, no_self, InvalidTarget, "bind=True gives the task as first argument"),
    ({"bind": 1}, plain, InvalidTarget, "bind is True or False; got int 1"),
    ({"nam": "x"}, plain, InvalidTarget, "has no option 'nam'. The nearest known name is name."),
    ({"autoretry": 1}, plain, InvalidTarget, "The nearest known name is autoretry_for."),
    ({"name": " x"}, plain, InvalidName, "must not begin or end with a blank"),
    ({"name": "dbqueue.x"}, plain, ReservedName, "dbqueue keeps for itself"),
    ({"queue": ""}, plain, InvalidName, "queue name must have 1"),
    ({"priority": 10}, plain, InvalidTarget, "priority must be"),
    ({"max_retries": -1}, plain, InvalidTarget, "max_retries must be an int from 0, or None for ever; got int -1"),
    ({"max_retries": 1.5}, plain, InvalidTarget, "max_retries must be an int from 0"),
    ({"default_retry_delay": "1"}, plain, InvalidTarget, "default_retry_delay must be a number of seconds"),
    ({"autoretry_for": (1,)}, plain, InvalidTarget, "autoretry_for takes exception classes; got int 1"),
    ({"retry_kwargs": {"queue": "q"}}, plain, InvalidTarget, "retry_kwargs takes max_retries, countdown and eta; not queue"),
    ({"time_limit": 3601}, plain, InvalidTarget, "timeout must be a number from 0.001 to 3600"),
    ({"soft_time_limit": 5, "time_limit": 4}, plain, InvalidTarget, "soft_time_limit must not be above time_limit; 5 is above 4"),
    ({"soft_time_limit": 31}, plain, InvalidTarget, "31 is above 30"),
    ({"expires": "x"}, plain, InvalidTarget, "expires must be a number of seconds"),
    ({"max_crashes": 0}, plain, InvalidTarget, "max_attempts must be"),
    ({"on_crash": "x"}, plain, InvalidTarget, "on_crash must be"),
    ({"acks_late": False}, plain, NotSupported, 'a job is never acknowledged before it ran; on_crash="fail" runs it'),
    ({"reject_on_worker_lost": False}, plain, NotSupported, "reject_on_worker_lost=True is what there is"),
    ({"ignore_result": False}, plain, NotSupported, "ignore_result=True is what there is; results are not stored"),
    ({"serializer": "pickle"}, plain, NotSupported, "serializer='json' is what there is"),
    ({"typing": False}, plain, NotSupported, "arguments are always checked"),
    ({"base": Task}, plain, NotSupported, "base= cannot be kept durable here"),
    ({"rate_limit": "1/s"}, plain, NotSupported, "rate_limit= cannot be kept"),
]  # fmt: skip


@pytest.mark.req("C8", "D1", "D10")
@pytest.mark.parametrize(("options", "function", "error", "told"), REFUSED)
def test_a_declaration_that_is_refused(
    bridge: Bridge, options: Any, function: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        bridge.task(**options)(function)
    assert told in str(caught.value)
    assert (bridge.tasks, bridge.queue.targets) == ({}, {})


@pytest.mark.req("C8", "D1")
def test_a_declaration(bridge: Bridge) -> None:
    @bridge.task
    def bare(x: int) -> int:
        """Says what it does."""
        return x

    named = bridge.task(
        name="n", queue="q", priority=5, time_limit=2.5, acks_late=True, track_started=True, max_crashes=7, on_crash="unknown"
    )(about)  # fmt: skip
    assert (bare.name, bare.__name__, bare.__doc__) == (
        "tests.bridge.test_declarations.bare",
        "bare",
        "Says what it does.",
    )
    assert str(inspect.signature(bare)) == "(x: 'int') -> 'int'"
    assert (bare.max_retries, bare.default_retry_delay, bare.target.policy.timeout_ms) == (3, 180, 30_000)
    policy = named.target.policy
    assert (policy.queue, policy.priority, policy.timeout_ms, policy.max_attempts, policy.on_crash.label) == (
        "q",
        5,
        2500,
        7,
        "unknown",
    )
    assert set(bridge.tasks) == set(bridge.queue.targets) == {bare.name, "n"}
    with pytest.raises(InvalidTarget, match="target 'n' is declared twice"):
        bridge.task(name="n")(plain)
    for refuse in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TargetIsNotAValue, match="task 'n' is no value"):
            refuse(named)
    with pytest.raises(TargetIsNotAValue, match="a signature of task 'n' is no value"):
        pickle.dumps(named.s())


@pytest.mark.req("C8")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"time_limit": 0}, "timeout must be"),
        ({"timezone": "Mars/Base"}, "timezone must be an IANA name"),
        ({"timezone": 5}, "timezone must be an IANA name"),
        ({"default_queue": ""}, "queue name"),
    ],
)
def test_a_bridge_that_is_refused(options: Any, told: str) -> None:
    with pytest.raises((ConfigError, InvalidTarget, InvalidName), match=told):
        Bridge(DBQueue(), **options)
    with pytest.raises(ConfigError, match="Bridge takes a DBQueue; got str"):
        Bridge("sqlite:///x.db")  # type: ignore[arg-type]


@pytest.mark.req("C8", "D9")
def test_a_task_that_a_child_would_not_find_is_refused_when_the_worker_starts(tmp_path: Path) -> None:
    """It has another name in its module than its function has."""
    queue = DBQueue(f"sqlite:///{tmp_path / 'q.db'}")
    other = Bridge(queue).task(name="other")(plain)
    with pytest.raises(
        ConfigError, match=r"target 'other': a child process looks for it as \S+test_declarations:plain"
    ):
        Worker(queue, WorkerOptions(pool="processes"))
    assert other(1) == 2
    queue.close()


# -- here and now ------------------------------------------------------------------------------------------------------


@pytest.mark.req("C8")
def test_called_as_a_function_it_is_one(bridge: Bridge) -> None:
    @bridge.task(bind=True, autoretry_for=(KeyError,))
    def act(self: Any, kind: str = "") -> Any:
        if kind == "auto":
            raise KeyError("auto")
        if kind:
            raise self.retry(exc=ValueError("exc") if kind == "exc" else None)
        return self.request.called_directly, self.request.retries, self.request.args, self.request.id

    assert act() == act.run() == (True, 0, [], None)
    for kind, error in (("exc", ValueError), ("none", Retry), ("auto", KeyError)):
        with pytest.raises(error):
            act(kind)
    assert act.request.called_directly


@pytest.mark.req("C8")
def test_a_task_inside_of_another_has_a_request_of_its_own(bridge: Bridge) -> None:
    @bridge.task(bind=True)
    def inner(self: Any) -> Any:
        return self.request.called_directly, self.request.id, outer.request.id

    @bridge.task(bind=True)
    def outer(self: Any) -> Any:
        return inner(), self.request.id

    assert outer.apply(task_id="o").get() == ((True, None, "o"), "o")
    assert (outer.request.id, outer.request.called_directly) == (None, True), "nothing of a run is left"


@pytest.mark.req("C8")
def test_apply_runs_it_with_its_retries(bridge: Bridge) -> None:
    @bridge.task(bind=True, max_retries=2)
    def act(self: Any, top: int, error: Any = None) -> Any:
        request = self.request
        if error is not None:
            raise error
        if request.retries < top:
            self.retry(countdown=1000, kwargs={"top": top})
        return request.retries, request.is_eager, request.id, request.headers

    done = act.apply(kwargs={"top": 2}, task_id="t", headers={"h": object}, priority=3)
    assert (done.state, done.id, done.successful(), done.ready(), done.failed()) == ("SUCCESS", "t", True, True, False)
    assert done.get() == done.result == (2, True, "t", {"h": object}), "nothing is stored, so nothing need be JSON"
    failed = act.apply(kwargs={"top": 3})
    assert (failed.state, failed.failed(), failed.traceback is not None) == ("FAILURE", True, True)
    with pytest.raises(MaxRetriesExceededError):
        failed.get()
    assert isinstance(failed.get(propagate=False), MaxRetriesExceededError)
    with pytest.raises(ZeroDivisionError):
        act.apply((0, ZeroDivisionError()), throw=True)
    assert act.apply((0, Ignore())).state == "IGNORED"
    assert (act.apply((0, Reject())).state, act.apply((0, Reject())).get()) == ("REJECTED", None)
    assert act.s(1).apply((), {"error": None}).get()[0] == 1
    with pytest.raises(TypeError):
        act.apply()
    with pytest.raises(NotSupported):
        act.apply((1,), link=act.s())  # type: ignore[call-arg]


@pytest.mark.req("C8")
@pytest.mark.parametrize("jitter", [True, False])
def test_the_backoff_is_celerys(bridge: Bridge, jitter: bool) -> None:
    task = bridge.task(
        autoretry_for=(ValueError,), retry_backoff=True, retry_backoff_max=600, retry_jitter=jitter, max_retries=None
    )(plain)
    longest = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]
    for retries, most in enumerate([*longest, *[600] * 5000]):
        waits = {task._autoretry(retries)["countdown"] for _ in range(50 if retries < 12 else 1)}
        assert waits == {most} if not jitter else all(0 <= wait <= most for wait in waits)
        assert not (jitter and 3 < retries < 12) or len(waits) > 1


# -- shared tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.req("C8")
def test_shared_tasks_belong_to_the_only_bridge_made_before_or_after() -> None:
    early = shared_task(plain)
    for use in (lambda: early.delay(1), lambda: early.target):
        with pytest.raises(
            ConfigError, match=r"plain' is bound to no queue yet: import the module that makes the Bridge"
        ):
            use()
    assert early(1) == 2, "as a function it needs none"
    queue = DBQueue()
    bridge = Bridge(queue)
    late = shared_task(name="late", bind=True, queue="q")(lambda self, x: x)
    assert set(queue.targets) == set(bridge.tasks) == {early.name, "late"}
    assert (early.target.policy.queue, late.target.policy.queue) == ("default", "q")


@pytest.mark.req("C8")
def test_with_several_bridges_nobody_can_say_whose_they_are() -> None:
    queues = [DBQueue() for _ in range(4)]
    bridges = [Bridge(queue) for queue in queues[:2]]  # as long as there is no shared task
    told = r"\('shared' is one\) belong to one Bridge, and there are those of \S+declarations and \S+declarations"
    with pytest.raises(ConfigError, match=told):
        shared_task(name="shared")(plain)
    assert [bridge.tasks for bridge in bridges] == [{}, {}]


@pytest.mark.req("C8")
def test_a_second_bridge_says_that_they_are_not_its_own() -> None:
    shared = shared_task(name="shared")(plain)
    first = Bridge(DBQueue())
    with pytest.raises(ConfigError, match=r"say Bridge\(queue, shared=False\) to the others"):
        Bridge(DBQueue())
    second = Bridge(DBQueue(), shared=False)
    assert (list(first.tasks), list(second.tasks), list(shared.target._writer.targets)) == (["shared"], [], ["shared"])  # type: ignore[attr-defined]


# -- imports and types -------------------------------------------------------------------------------------------------


@pytest.mark.req("C8")
def test_importing_it_imports_neither_celery_nor_kombu() -> None:
    program = """
import sys
from celery_bridge import *
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("celery", "kombu", "vine", "billiard", "amqp", "psycopg")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


TYPED = """
from typing import Any
from celery_bridge import Bridge, Task, shared_task
from dbqueue import DBQueue
bridge = Bridge(DBQueue())

@bridge.task
def add(x: int, y: int = 2) -> int: return x + y
@bridge.task(bind=True, max_retries=2)
def bound(self: Task[..., None], x: int) -> None: ...
@shared_task(queue="q")
def shared(x: str) -> str: return x

good: list[Any] = [add.delay(1), add.delay(1, y=3), bound.delay(1), shared.delay("x"), add.s(1).delay(2)]
good.append(add.apply_async((1,), countdown=3))
number: int = add(1)
number = add.apply((1,)).get()
"""
WRONG = {
    'add.delay("a")': 'Argument 1 to "delay" of "Task" has incompatible type "str"; expected "int"',
    "add.delay(1, 2, 3)": 'Too many arguments for "delay" of "Task"',
    "bound.delay()": 'Missing positional argument "x" in call to "delay" of "Task"',
    "shared.delay(1)": 'Argument 1 to "delay" of "Task" has incompatible type "int"; expected "str"',
    "add.apply_async((1,), countdwn=3)": 'Unexpected keyword argument "countdwn"',
    'bridge.task(nam="x")': 'Unexpected keyword argument "nam"',
    "text: str = add(1)": 'Incompatible types in assignment (expression has type "int", variable has type "str")',
}


@pytest.mark.soak
def test_call_sites_are_typed(tmp_path: Any) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED + "\n".join(WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", tmp_path / "cache", file],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    first = TYPED.count("\n") + 1
    said = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if " error: " in line}
    assert set(said) == set(range(first, first + len(WRONG))), done.stdout
    for number, told in enumerate(WRONG.values(), first):
        assert told in said[number]
