"""Declared tasks: functions with Celery's call sites, whose calls are dbqueue's jobs.

A task is the call site; its target, which the workers know, is made when it is bound to a ``Bridge``. A run is one claim of the job:
an error or the hard time limit ends it as dead, ``self.retry`` makes the same row pending again, and a crash gives it another run.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime, timezone, tzinfo
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

import msgspec

from celery_bridge import calls
from celery_bridge.calls import Call, CallSchema
from celery_bridge.options import NO_CANVAS, call_options, task_options
from celery_bridge.request import Ignore, MaxRetriesExceededError, Reject, Request, Retry, soft_limit
from celery_bridge.results import AsyncResult, EagerResult
from celery_bridge.signatures import Signature
from dbqueue.clock import SECOND
from dbqueue.database.tables import DEFAULT_PRIORITY
from dbqueue.errors import (
    Bury,
    ConfigError,
    InvalidArgument,
    InvalidTarget,
    NotSupported,
    RetryLater,
    TargetIsNotAValue,
)
from dbqueue.queue import DBQueue
from dbqueue.runtime.context import current_job
from dbqueue.settings import MAX_NAME, check_name, check_target_policy, describe
from dbqueue.states import OnCrash
from dbqueue.targets import Policy, Target, default_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_bridge.options import CallOptions

P = ParamSpec("P")
R = TypeVar("R")

MAX_CRASHES = 20
"""So many runs of a job may be lost with their process or their lease before it is dead, unless the declaration says otherwise."""


class Home(Protocol):
    """Where a task's jobs go, and what holds for all tasks there: a ``Bridge``."""

    @property
    def queue(self) -> DBQueue: ...
    @property
    def time_limit(self) -> float: ...
    @property
    def default_queue(self) -> str: ...
    @property
    def zone(self) -> tzinfo: ...


class Task(Generic[P, R]):
    """A declared task; made by ``bridge.task`` and ``shared_task``. Called, it runs here and now, as any function."""

    __dbqueue_target__ = True  # so that the payload checks tell it apart from a value

    def __init__(self, function: Callable[..., R], options: Mapping[str, Any], *, bind: bool = False) -> None:
        """Checks the declaration whole. Raises InvalidTarget, InvalidName, NotSupported; nothing is registered here."""
        if not inspect.isfunction(function):
            raise InvalidTarget(f"a task is a plain function; got {type(function).__name__}")
        self.name = check_name("target", options.get("name") or default_name(function))
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise InvalidTarget(
                f"task {self.name!r}: it is a generator or a coroutine function; Celery's tasks are plain functions"
            )
        functools.update_wrapper(self, function)
        self._function, self._bind = function, bind
        self._schema = CallSchema(self.name, function, bind=bind)
        self._declare(task_options(f"task {self.name!r}", options, InvalidTarget))
        self._request: ContextVar[Request | None] = ContextVar("celery_bridge_request", default=None)
        self._home: Home | None = None
        self._target: Target[Call] | None = None

    def _declare(self, kept: Mapping[str, Any]) -> None:
        self.max_retries: int | None = kept.get("max_retries", 3)
        self.default_retry_delay: float = kept.get("default_retry_delay", 180)
        self.autoretry_for = tuple(kept.get("autoretry_for") or ())
        self.dont_autoretry_for = tuple(kept.get("dont_autoretry_for") or ())
        self.retry_kwargs: dict[str, Any] = dict(kept.get("retry_kwargs") or {})
        self.retry_backoff: float = kept.get("retry_backoff", False)
        self.retry_backoff_max: float = kept.get("retry_backoff_max", 600)
        self.retry_jitter: bool = kept.get("retry_jitter", True)
        self.time_limit: float | None = kept.get("time_limit")
        self.soft_time_limit: float | None = kept.get("soft_time_limit")
        self.expires: float | None = kept.get("expires")
        self.queue: str | None = kept.get("queue")
        priority = kept.get("priority")
        self.priority: int = DEFAULT_PRIORITY if priority is None else priority
        self.max_crashes: int = kept.get("max_crashes", MAX_CRASHES)
        self.on_crash: str = kept.get("on_crash", "retry")
        check_target_policy(
            self.name, max_attempts=self.max_crashes, timeout=1 if self.time_limit is None else self.time_limit,
            priority=self.priority, on_crash=self.on_crash,
        )  # fmt: skip
        if self.queue is not None:
            check_name("queue", self.queue)
        retries = self.max_retries
        if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
            raise InvalidTarget(
                f"task {self.name!r}: max_retries must be an int from 0, or None for ever; got {describe(retries)}"
            )
        for exception in (*self.autoretry_for, *self.dont_autoretry_for):
            if not (isinstance(exception, type) and issubclass(exception, BaseException)):
                raise InvalidTarget(
                    f"task {self.name!r}: autoretry_for takes exception classes; got {describe(exception)}"
                )
        if unknown := set(self.retry_kwargs) - {"max_retries", "countdown", "eta"}:
            raise InvalidTarget(
                f"task {self.name!r}: retry_kwargs takes max_retries, countdown and eta; not {', '.join(unknown)}"
            )
        try:
            for option in ("default_retry_delay", "retry_backoff_max", "expires", "soft_time_limit"):
                if (value := getattr(self, option)) is not None:
                    calls.seconds(option, value)
            calls.seconds("retry_backoff", float(self.retry_backoff))
            _check_limits(self.soft_time_limit, self.time_limit)
        except InvalidArgument as error:
            raise InvalidTarget(f"task {self.name!r}: {error}") from None

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind_to(self, home: Home) -> None:
        """Makes its target and registers it with the home's queue. Raises InvalidTarget if the name is taken there."""
        limit = home.time_limit if self.time_limit is None else self.time_limit
        try:
            _check_limits(self.soft_time_limit, limit)
        except InvalidArgument as error:
            raise InvalidTarget(f"task {self.name!r}: {error}") from None

        @functools.wraps(self._function)
        def handler(call: Call) -> None:
            self._work(call)

        target: Target[Call] = Target(
            self.name,
            handler,
            self._schema,
            Policy(
                max_attempts=self.max_crashes,
                timeout_ms=check_target_policy(self.name, max_attempts=1, timeout=limit),
                queue=self.queue or home.default_queue,
                priority=self.priority,
                on_crash=OnCrash[self.on_crash.upper()],
                retry=None,
                one_try=True,
            ),
            home.queue,
        )
        home.queue.add(target)
        self._home, self._target = home, target

    @property
    def target(self) -> Target[Call]:
        """What the workers know of it. Raises ConfigError while no Bridge is made."""
        return self._bound[1]

    @property
    def _bound(self) -> tuple[Home, Target[Call]]:
        if self._home is None or self._target is None:
            raise ConfigError(
                f"task {self.name!r} is bound to no queue yet: import the module that makes the Bridge before it is called"
            )
        return self._home, self._target

    # -- call sites --------------------------------------------------------------------------------------------------

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Writes a job: in the caller's transaction inside ``dbqueue.using(...)``, else in a short one of its own that has committed
        when this returns. Raises TypeError, InvalidPayload before anything is written, else what ``Target.enqueue`` raises."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]
    ) -> AsyncResult[R]:
        """``delay`` with options. ``countdown`` (seconds) or ``eta``: not before; ``expires`` (seconds, or an instant): not begun
        after; an instant without a zone is meant in the bridge's timezone. ``task_id`` need not be unique. Raises InvalidArgument for
        an unknown option, NotSupported for one that cannot be kept."""
        kept = call_options(f"task {self.name!r}", options)
        home, target = self._bound
        run_at, delay, eta = self._start(kept, home.zone)
        ttl, expires = self._expiry(kept, home.zone)
        hard, soft = kept.get("time_limit"), kept.get("soft_time_limit")
        _check_limits(
            self.soft_time_limit if soft is None else soft, target.policy.timeout_ms / 1000 if hard is None else hard
        )
        timeout_ms = (
            target.policy.timeout_ms if hard is None else check_target_policy(self.name, max_attempts=1, timeout=hard)
        )
        queue, task_id, priority, headers = (
            kept.get("queue"),
            kept.get("task_id"),
            kept.get("priority"),
            kept.get("headers"),
        )
        call = self._schema.call(
            args or (), kwargs or {}, task_id=_check_task_id(task_id), queue=None if queue is None else check_name("queue", queue),
            priority=priority, headers=dict(headers) if headers else None, eta=eta, expires=expires, limits=(hard, soft),
        )  # fmt: skip
        job = target.new_job(call, kept.get("key"), run_at, delay, priority)
        shown = task_id or str(uuid.UUID(bytes=job.id))
        job = msgspec.structs.replace(job, queue=queue or job.queue, task_id=shown, ttl=ttl, timeout_ms=timeout_ms)
        ref = home.queue.write([job])[0]
        return AsyncResult(home.queue, task_id or str(ref.id), ref.id, ref.duplicate)

    def _start(self, kept: Mapping[str, Any], zone: tzinfo) -> tuple[int | None, int, str | None]:
        """(instant, or microseconds of delay; what the request says about it)"""
        countdown, eta = kept.get("countdown"), kept.get("eta")
        if countdown is not None and eta is not None:
            raise InvalidArgument(f"task {self.name!r}: give countdown or eta, not both")
        if eta is not None:
            when = calls.instant("eta", eta, zone)
            return round(when.timestamp() * SECOND), 0, when.isoformat()
        if countdown is None:
            return None, 0, None
        delay = calls.seconds("countdown", countdown)
        return None, round(delay * SECOND), calls.after(delay).isoformat()

    def _expiry(self, kept: Mapping[str, Any], zone: tzinfo) -> tuple[int | None, str | None]:
        """(microseconds to live; what the request says about it)"""
        expires = kept.get("expires", self.expires)
        if expires is None:
            return None, None
        if isinstance(expires, (datetime, str)):
            when = calls.instant("expires", expires, zone)
            return round(calls.until(when) * SECOND), when.isoformat()
        left = calls.seconds("expires", expires)
        return round(left * SECOND), calls.after(left).isoformat()

    def apply(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *, throw: bool = False,
        retries: int = 0, **options: Unpack[CallOptions],
    ) -> EagerResult[R]:  # fmt: skip
        """Runs the task here and now, its retries at once after it; nothing is written. ``throw``: raise what it raises."""
        kept = call_options(f"task {self.name!r}", options)
        call = self._schema.call(args or (), kwargs or {})
        task_id = kept.get("task_id") or str(uuid.uuid4())
        while True:
            request = Request(
                id=task_id, task=self.name, args=call.args, kwargs=call.kwargs, retries=retries, headers=kept.get("headers"),
                delivery_info={"is_eager": True, "exchange": None, "routing_key": kept.get("queue"), "priority": kept.get("priority")},
                is_eager=True, called_directly=False, call=call,
            )  # fmt: skip
            try:
                return EagerResult(task_id, self._run(request), "SUCCESS")
            except Retry as again:
                call, retries = again.call or call, retries + 1
            except Ignore:
                return EagerResult(task_id, None, "IGNORED")
            except Reject:
                return EagerResult(task_id, None, "REJECTED")
            except Exception as error:
                if throw:
                    raise
                return EagerResult(task_id, error, "FAILURE", traceback.format_exc())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(Request(args=list(args), kwargs=dict(kwargs)))

    run = __call__

    def signature(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None, *, immutable: bool = False, **more: Any,
    ) -> Signature[R]:  # fmt: skip
        """A call to be made later. It is no value: only its ``payload`` can be stored, by a schedule."""
        return Signature(self, tuple(args or ()), dict(kwargs or {}), {**(options or {}), **more}, immutable=immutable)

    subtask = signature

    def s(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """A signature of these arguments, perhaps not all of them yet."""
        return self.signature(args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """A signature that takes no more arguments."""
        return self.signature(args, kwargs, immutable=True)

    def AsyncResult(self, task_id: str) -> AsyncResult[R]:  # noqa: N802 - Celery's name
        """The newest call of this task with this id; the id of a job that a schedule wrote is the job's."""
        queue = self._bound[0].queue
        found = queue.jobs(task_id=_check_task_id(task_id), target=self.name)
        found = sorted(found, key=lambda job: (job.created_at, job.id), reverse=True)
        with suppress(ValueError):
            job = None if found else queue.get_job(uuid.UUID(task_id))
            found = [job] if job is not None and job.target == self.name else found
        return AsyncResult(queue, task_id, found[0].id if found else None)

    # -- a run -------------------------------------------------------------------------------------------------------

    @property
    def request(self) -> Request:
        """This run of the task; outside of one, a request that says ``called_directly``."""
        return self._request.get() or Request()

    def _work(self, call: Call) -> None:
        """The handler of its target."""
        job = current_job()
        assert job is not None
        policy = self.target.policy
        hard, soft = call.limits
        soft = self.soft_time_limit if soft is None else soft
        request = Request(
            id=call.task_id or str(job.id), task=self.name, args=call.args, kwargs=call.kwargs, retries=call.retries, headers=call.headers,
            delivery_info={
                "exchange": "", "routing_key": call.queue or policy.queue,
                "priority": policy.priority if call.priority is None else call.priority, "redelivered": job.attempt > call.retries + 1,
            },
            eta=call.eta, expires=call.expires, call=call, timelimit=(policy.timeout_ms / 1000 if hard is None else hard, soft),
            called_directly=False,
        )  # fmt: skip
        try:
            with soft_limit(self.name, soft):
                self._run(request)
        except Ignore:
            return
        except Reject as error:
            reason = error.reason if error.reason is None or isinstance(error.reason, type) else type(error.reason)
            told = f"rejected: {reason.__name__}" if isinstance(reason, type) else "rejected"
            if error.requeue:
                raise RetryLater(told, delay=0) from error
            raise Bury(told) from error

    def _run(self, request: Request) -> R:
        token = self._request.set(request)
        given = (self, *(request.args or ())) if self._bind else (request.args or ())
        try:
            result: R = self._function(*given, **(request.kwargs or {}))
        except Exception as error:
            if request.again is None and self._retries_by_itself(error):
                self.retry(exc=error, throw=False, **self._autoretry(request.retries))
            if request.again is None or request.again is error:
                raise
            raise request.again from error
        finally:
            self._request.reset(token)
        if request.again is not None:
            raise request.again
        return result

    def _retries_by_itself(self, error: Exception) -> bool:
        said = (Ignore, Reject, RetryLater, Bury)  # it has said itself how it goes on
        return isinstance(error, self.autoretry_for) and not isinstance(error, (*said, *self.dont_autoretry_for))

    def _autoretry(self, retries: int) -> dict[str, Any]:
        options = dict(self.retry_kwargs)
        if self.retry_backoff:
            # Celery's arithmetic; the power is bounded, as a task may be retried for ever.
            factor = int(max(1.0, self.retry_backoff))
            longest = min(int(self.retry_backoff_max), factor * 2 ** min(retries, 40))
            options["countdown"] = random.randrange(longest + 1) if self.retry_jitter else longest
        return options

    def retry(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, exc: BaseException | None = None,
        throw: bool = True, eta: datetime | str | None = None, countdown: float | None = None, max_retries: int | None = None,
        **options: Any,
    ) -> Retry:  # fmt: skip
        """The same job runs again, after ``countdown`` seconds or at ``eta`` (``default_retry_delay`` if neither is given), with other
        arguments if they are given. Raises Retry, which the task lets through; with ``throw=False`` it is returned, and the job runs
        again however the task ends. After ``max_retries`` retries it raises ``exc``, or MaxRetriesExceededError. Outside of a
        worker it raises ``exc``. Raises NotSupported for options that only a new job can have (queue, priority, expires)."""
        request, what = self.request, f"retry() of task {self.name!r}"
        if refused := sorted(call_options(what, options)):
            raise NotSupported(
                f"{what}: a retry is the same job, and keeps its {', '.join(refused)}; call delay(...) for another"
            )
        if request.called_directly:
            raise exc or Retry("not in a worker")
        retries, limit = request.retries + 1, self.max_retries if max_retries is None else max_retries
        if limit is not None and retries > limit:
            raise exc or MaxRetriesExceededError(f"task {self.name!r} was retried {limit} times")
        delay, when = self._wait(eta, countdown)
        made = request.call or Call([], {}, [])
        call = self._schema.call(
            *self._schema.changed(made, args, kwargs), retries=retries, task_id=made.task_id, queue=made.queue, priority=made.priority,
            headers=made.headers, eta=calls.after(delay).isoformat(), expires=made.expires, limits=made.limits,
        )  # fmt: skip
        cause = sys.exc_info()[0] if exc is None else type(exc)
        told = f"{retries}" + ("" if limit is None else f" of {limit}") + (f" after {cause.__name__}" if cause else "")
        payload = b"" if request.is_eager else self._schema.encode(call)
        request.again = Retry(told, exc, when, call=call, is_eager=request.is_eager, payload=payload, delay=delay)
        if throw:
            raise request.again
        return request.again

    def _wait(self, eta: datetime | str | None, countdown: float | None) -> tuple[float, float | datetime]:
        """(seconds, what was asked for)"""
        if eta:
            when = calls.instant("eta", eta, self._home.zone if self._home else timezone.utc)
            return calls.until(when), when
        delay = calls.seconds("countdown", self.default_retry_delay if countdown is None else countdown)
        return delay, delay

    # -- what it is not ----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def _no_value(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TargetIsNotAValue(
            f"task {self.name!r} is no value: it cannot be copied, pickled or put into arguments; give its name"
        )

    __reduce__ = __reduce_ex__ = __copy__ = __deepcopy__ = _no_value

    def _no_canvas(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"task {self.name!r}: canvas cannot be kept durable here; {NO_CANVAS}")

    map = starmap = chunks = replace = add_to_chord = __or__ = _no_canvas

    def _no_backend(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(
            f"task {self.name!r}: states of one's own are not stored; write them where they belong, in your own table"
        )

    update_state = send_event = _no_backend


def _check_limits(soft: float | None, hard: float | None) -> None:
    if soft is not None and hard is not None and calls.seconds("soft_time_limit", soft) > hard:
        raise InvalidArgument(f"soft_time_limit must not be above time_limit; {soft:g} is above {hard:g}")


def _check_task_id(task_id: object) -> Any:
    if task_id is not None and not (
        isinstance(task_id, str) and 1 <= len(task_id) <= MAX_NAME and task_id.isprintable()
    ):
        raise InvalidArgument(
            f"task_id must be a str of 1 to {MAX_NAME} printable characters; got {type(task_id).__name__}"
        )
    return task_id
