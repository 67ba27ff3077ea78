"""Job targets: statically declared functions with one typed record as input, or none (D1, D3).

A target is neither a function nor a value. Calling, pickling or copying one is an error that names the right call, since each
would run or move work outside of the queue. Enqueueing needs the declaration only: the handler's own dependencies are not
imported, checked or run (D4).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Generic, NoReturn, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from dbqueue import clock, ids, retry
from dbqueue.database.tables import NewJob, stored_priority
from dbqueue.errors import InvalidArgument, InvalidTarget, QueueError, TargetIsNotAValue
from dbqueue.payload import encode_json, schema_of
from dbqueue.settings import RESERVED_PREFIX, check_key, check_name, check_target_policy, describe
from dbqueue.states import OnCrash, State

P = TypeVar("P")
A = ParamSpec("A")
R = TypeVar("R")

MAX_BATCH = 10_000
"""Jobs that one ``enqueue_many`` takes: one statement and one transaction hold them all."""

MAX_DELAY = 3650 * 86_400
"""Ten years, in seconds."""


def told(
    what: str, example: str, error: type[QueueError] = InvalidArgument
) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Decorates a call of the public interface: arguments that do not fit its signature raise ``error`` with the option's name and
    the remedy, where Python would raise a TypeError with neither. A call that fits costs nothing more."""

    def decorate(function: Callable[A, R]) -> Callable[A, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: A.args, **kwargs: A.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError:
                    problem = _misfit(what, signature, args, kwargs)
                else:  # it came from within
                    raise
            raise error(f"{problem}: {example}")

        return call

    return decorate


def _misfit(what: str, signature: inspect.Signature, args: Sequence[object], given: Iterable[str]) -> str:
    """Of the first argument that does not fit."""
    known = {name: p for name, p in signature.parameters.items() if name != "self"}
    options = [name for name, p in known.items() if p.kind is p.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name[:100], options, n=1, cutoff=0.0)[0]
            return (
                f"{what} has no option {name[:100]!r}. The nearest known name is {nearest}. Correct it or take it out"
            )
    if len(args) - 1 > len(known) - len(options):
        return f"{what} takes its options in parentheses and by name. Write them so"
    needed = [name for name, p in list(known.items())[len(args) - 1 :] if p.default is p.empty and name not in given]
    if needed:
        return f"{what} needs {' and '.join(needed)}. Add what is missing"
    return f"{what} was given an argument twice. Leave one out"


RAW_ATTEMPTS, RAW_BACKOFF = 3, 5.0
"""What a raw queue's jobs get unless the call says otherwise (A5)."""


class _Missing:
    def __repr__(self) -> str:
        return "<nothing>"


MISSING = _Missing()


@dataclass(frozen=True)
class JobRef:
    """The answer to enqueue. ``duplicate``: an unfinished job with this key existed already, and ``id`` is that job's. None: not known
    before the async session's commit writes the job (and then ``id`` counts only if it was no duplicate)."""

    id: UUID
    duplicate: bool | None


@dataclass(frozen=True)
class Policy:
    """What a declaration says about its jobs; stored with each job when it is enqueued."""

    max_attempts: int
    timeout_ms: int
    queue: str
    priority: int
    on_crash: OnCrash
    retry: retry.Retry | None
    one_try: bool = False
    """An error or a timeout ends the job (Celery's rule); it runs again only after a crash, or when the handler asks for it."""


class Schema(Protocol):
    """What a target asks of the type of its payloads: a ``PayloadSchema``, or what a door has in its place."""

    @property
    def record(self) -> type | None: ...
    @property
    def fingerprint(self) -> bytes: ...
    def encode(self, value: object, /) -> bytes: ...
    def decode(self, data: bytes, /) -> Any: ...


class Writer(Protocol):
    """Where a target's jobs are written: the queue it was declared on."""

    def write(self, jobs: Sequence[NewJob]) -> list[JobRef]: ...


class Target(Generic[P]):
    """A declared target; made by ``@queue.job(...)``. Immutable and safe to share between threads."""

    __dbqueue_target__ = True  # told apart by the payload checks, which stand below this module
    done: ClassVar[State] = State.SUCCEEDED
    """How a job ends whose handler returned."""

    def __init__(self, name: str, handler: Callable[..., Any], schema: Schema, policy: Policy, writer: Writer) -> None:
        self.name, self.handler, self.schema, self.policy = name, handler, schema, policy
        self.is_async = inspect.iscoroutinefunction(handler)
        self._writer = writer
        self.__doc__ = handler.__doc__

    @told("enqueue()", "enqueue(Record(...), key=..., delay=...)")
    def enqueue(
        self, payload: P | _Missing = MISSING, *, key: str | None = None, run_at: datetime | None = None, delay: float | None = None,
        priority: int | None = None,
    ) -> JobRef:  # fmt: skip
        """Writes one job: in the caller's transaction inside ``dbqueue.using(...)``, else in a short one of its own that has committed
        when this returns.

        ``key``: at most one unfinished job of this target has it; a second call returns that job's id. ``run_at``: an aware
        datetime; ``delay``: seconds from the database's now. Everything is checked before anything is written. Raises
        InvalidPayload, InvalidArgument, EnqueueFailed, ConnectionLost, DatabaseBusy; never an error of the handler (D3, D4, D5)."""
        return self._writer.write([self.new_job(payload, key, *_when(run_at, delay), priority)])[0]

    @told("enqueue_at()", "enqueue_at(when, Record(...), key=...)")
    def enqueue_at(
        self, when: datetime, payload: P | _Missing = MISSING, *, key: str | None = None, priority: int | None = None
    ) -> JobRef:
        """``enqueue`` with ``run_at=when`` (D3)."""
        return self.enqueue(payload, key=key, run_at=when, priority=priority)

    @told("enqueue_many()", "enqueue_many([Record(...), ...], keys=..., delay=...)")
    def enqueue_many(
        self, payloads: Iterable[P], *, keys: Iterable[str | None] | None = None, run_at: datetime | None = None,
        delay: float | None = None, priority: int | None = None,
    ) -> list[JobRef]:  # fmt: skip
        """Writes all of them with one statement in one transaction, all or none; the answers are in the order of ``payloads``.
        ``keys`` gives one key (or None) for each. At most 10,000 at once."""
        listed = list(payloads)
        named = [None] * len(listed) if keys is None else list(keys)
        if len(named) != len(listed):
            raise InvalidArgument(
                f"target {self.name!r}: {len(listed)} payloads but {len(named)} keys; give one key (or None) each"
            )
        if len(listed) > MAX_BATCH:
            raise InvalidArgument(
                f"target {self.name!r}: {len(listed)} payloads at once, the limit is {MAX_BATCH}; split them"
            )
        when = _when(run_at, delay)
        jobs = [self.new_job(payload, key, *when, priority) for payload, key in zip(listed, named, strict=True)]
        return self._writer.write(jobs) if jobs else []

    def new_job(
        self, payload: Any, key: str | None, run_at: int | None = None, delay: int = 0, priority: int | None = None
    ) -> NewJob:
        """A checked job that is not written yet."""
        if payload is MISSING:
            if self.schema.record is not None:
                raise InvalidArgument(
                    f"target {self.name!r} takes a {self.schema.record.__name__}: give it to enqueue(...)"
                )
            payload = None
        if priority is not None:
            check_target_policy(self.name, max_attempts=1, timeout=1, priority=priority)
        policy = self.policy
        return NewJob(
            id=ids.new_id(),
            target=self.name,
            queue=policy.queue,
            payload=self.schema.encode(payload),
            fingerprint=self.schema.fingerprint,
            max_attempts=policy.max_attempts,
            timeout_ms=policy.timeout_ms,
            priority=stored_priority(policy.priority if priority is None else priority),
            on_crash=policy.on_crash,
            key=None if key is None else check_key(key),
            run_at=run_at,
            delay=delay,
        )

    def __repr__(self) -> str:
        return f"<Target {self.name}>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TargetIsNotAValue(
            f"target {self.name!r} is neither a function nor a value: it cannot be called, copied, pickled or put into a payload. "
            f"Enqueue a job with {self.name.rpartition('.')[2]}.enqueue(...); to run the code itself, call a plain function from both"
        )

    __call__ = __reduce__ = __reduce_ex__ = __copy__ = __deepcopy__ = __iter__ = __or__ = _refuse


class Declare(Protocol):
    """What ``queue.job(...)`` returns: a decorator for a function of one record, or of nothing."""

    @overload
    def __call__(self, handler: Callable[[], Coroutine[Any, Any, None]], /) -> Target[None]: ...
    @overload
    def __call__(self, handler: Callable[[], None], /) -> Target[None]: ...
    @overload
    def __call__(self, handler: Callable[[P], Coroutine[Any, Any, None]], /) -> Target[P]: ...
    @overload
    def __call__(self, handler: Callable[[P], None], /) -> Target[P]: ...


def declare(
    handler: Callable[..., Any], *, writer: Writer, name: str | None, namespace: dict[str, Any], max_attempts: object, timeout: object,
    queue: object, priority: object, retry_policy: object, on_crash: object,
) -> Target[Any]:  # fmt: skip
    """Checks a declaration whole (D1, D2) and makes its target. Raises InvalidTarget, InvalidName; nothing is registered here."""
    if not inspect.isfunction(handler):
        raise InvalidTarget(f"@queue.job decorates a plain function; got {type(handler).__name__}")
    name = check_name("target", name or default_name(handler))
    timeout_ms = check_target_policy(
        name, max_attempts=max_attempts, timeout=timeout, priority=priority, on_crash=on_crash
    )
    try:
        policy = retry.parse(retry_policy, retry.Backoff(1, 1))
    except InvalidArgument as error:
        raise InvalidTarget(f"target {name!r}: retry: {error}") from None
    schema = schema_of(_record_of(handler, name, namespace), target=name)
    return Target(
        name,
        handler,
        schema,
        Policy(
            max_attempts=typing.cast(int, max_attempts),
            timeout_ms=timeout_ms,
            queue=check_name("queue", queue),
            priority=typing.cast(int, priority),
            on_crash=OnCrash[str(on_crash).upper()],
            retry=None if retry_policy is None else policy,
        ),
        writer,
    )


def default_name(handler: Callable[..., Any]) -> str:
    """``module.function``. A module that runs as a script is named as an import would name it: workers import it."""
    module = handler.__module__
    if module in ("__main__", "__mp_main__"):  # the latter is the same script in a child of multiprocessing
        main = sys.modules[module]
        spec = getattr(main, "__spec__", None)
        file = getattr(main, "__file__", None)
        module = spec.name if spec else file.rpartition("/")[2].removesuffix(".py") if file else module
    return f"{module}.{handler.__qualname__.rpartition('.')[2]}"


def _record_of(handler: Callable[..., Any], name: str, namespace: dict[str, Any]) -> type | None:
    def refuse(what: str, remedy: str) -> NoReturn:
        raise InvalidTarget(f"target {name!r}: {what}; {remedy}")

    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        refuse("it is a generator function", "write a plain function or a coroutine function (async def)")
    parameters = list(inspect.signature(handler).parameters.values())
    try:
        hints = typing.get_type_hints(handler, localns=namespace, include_extras=True)
    except Exception as error:
        refuse(
            f"its annotations cannot be resolved ({type(error).__name__})",
            "import the names that they use at module level",
        )
    if "return" not in hints or hints["return"] is not type(None):
        refuse("return: a handler returns None", "annotate it with -> None and store results where they belong")
    if not parameters:
        return None
    for parameter in parameters[1:]:
        refuse(
            f"parameter {parameter.name!r}: a handler takes one record or nothing",
            "make its values fields of one record",
        )
    only = parameters[0]
    if only.kind not in (only.POSITIONAL_ONLY, only.POSITIONAL_OR_KEYWORD) or only.default is not only.empty:
        refuse(f"parameter {only.name!r}: it must be plain, without a default", "declare it as `payload: Record`")
    if only.name not in hints:
        refuse(f"parameter {only.name!r}: it has no annotation", "annotate it with a dataclass or msgspec.Struct")
    return typing.cast(type, hints[only.name])


def wish(delay: object) -> int | None:
    """What a handler asks for with RetryLater, in microseconds; None, and so the target's own backoff, for what is no number of
    seconds."""
    if isinstance(delay, bool) or not isinstance(delay, (int, float)) or delay != delay:
        return None
    return round(min(max(0.0, delay), MAX_DELAY) * clock.SECOND)


def raw_job(
    name: str,
    payload: Any,
    key: str | None,
    priority: int,
    max_attempts: int,
    run_at: int | None = None,
    delay: int = 0,
) -> NewJob:
    """A checked job of a raw queue, which has no target (A8). Raises InvalidName, ReservedName, InvalidArgument."""
    check_name("queue", name)
    check_target_policy(f"raw queue {name}", max_attempts=max_attempts, timeout=1, priority=priority)
    data = encode_json(f"raw queue {name!r}", payload)
    return NewJob(
        id=ids.new_id(), target=f"{RESERVED_PREFIX}raw.{name}", queue=name, payload=data, max_attempts=max_attempts,
        priority=stored_priority(priority), key=None if key is None else check_key(key), run_at=run_at, delay=delay,
    )  # fmt: skip


def _when(run_at: datetime | None, delay: float | None) -> tuple[int | None, int]:
    """(instant or None, microseconds of delay), checked."""
    if run_at is not None and delay is not None:
        raise InvalidArgument("give run_at or delay, not both")
    if run_at is not None:
        if not isinstance(run_at, datetime):
            raise InvalidArgument(f"run_at must be an aware datetime; got {describe(run_at)}")
        if run_at.tzinfo is None or run_at.utcoffset() is None:
            raise InvalidArgument(
                "run_at must be aware: a datetime without a timezone names no instant (add tzinfo=timezone.utc)"
            )
        return clock.to_instant(run_at), 0
    if delay is None:
        return None, 0
    if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay <= MAX_DELAY:
        raise InvalidArgument(f"delay must be a number of seconds from 0 to {MAX_DELAY}; got {describe(delay)}")
    return None, round(delay * clock.SECOND)
