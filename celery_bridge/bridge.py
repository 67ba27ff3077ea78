"""``Bridge``: where tasks are declared for one queue; and ``shared_task``, for libraries that do not know the queue."""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timezone as fixed
from datetime import tzinfo
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, Protocol, TypeVar, overload
from zoneinfo import ZoneInfo

from celery_bridge.declared import Task
from celery_bridge.results import AsyncResult
from celery_bridge.signatures import Signature
from dbqueue.errors import ConfigError, InvalidTarget, NotSupported, UnknownTarget
from dbqueue.queue import DBQueue
from dbqueue.settings import check_name, check_target_policy, describe

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_bridge.options import CallOptions, TaskOptions

P = ParamSpec("P")
R = TypeVar("R")

TIME_LIMIT = 30.0
"""Seconds. Below the usual lease, as SQLite needs it (D18)."""


class Declare(Protocol):
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class DeclareBound(Protocol):
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> Task[P, R]: ...


class Bridge:
    """Celery's call sites on a ``DBQueue``: ``bridge = Bridge(queue)``, then ``@bridge.task``.

    ``time_limit`` (seconds, at most 3600) ends a run whose task says nothing itself; on SQLite it must stay below the lease.
    ``timezone`` (IANA) is that of instants without one. ``default_queue`` is for tasks that name none. The only Bridge of a process
    takes the shared tasks; of several, those that do not say ``shared=False`` would, so one at most may. Nothing is asked of the
    database. Raises ConfigError."""

    def __init__(
        self, queue: DBQueue, *, time_limit: float = TIME_LIMIT, timezone: str = "UTC", default_queue: str = "default", shared: bool = True
    ) -> None:  # fmt: skip
        if not isinstance(queue, DBQueue):
            raise ConfigError(f"Bridge takes a DBQueue; got {describe(queue)}")
        self.queue, self.time_limit = queue, time_limit
        self.default_queue = check_name("queue", default_queue)
        check_target_policy("Bridge", max_attempts=1, timeout=time_limit)
        self.zone = _zone(timezone)
        self.module = str(sys._getframe(1).f_globals.get("__name__"))
        self._tasks: dict[str, Task[Any, Any]] = {}
        if shared:
            _shared.take(self)

    @property
    def tasks(self) -> Mapping[str, Task[Any, Any]]:
        """By name."""
        return dict(self._tasks)

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, *, bind: Literal[True], **options: Unpack[TaskOptions]) -> DeclareBound: ...
    @overload
    def task(self, /, *, bind: Literal[False] = False, **options: Unpack[TaskOptions]) -> Declare: ...
    def task(self, function: Callable[..., Any] | None = None, /, *, bind: bool = False, **options: Any) -> Any:
        """Declares a task: ``@bridge.task`` or ``@bridge.task(bind=True, max_retries=5, ...)``. ``name`` defaults to module.function and
        is stored: renaming it orphans stored jobs. Raises InvalidTarget, NotSupported."""
        return _decorated(function, bind, options, self.add)

    def add(self, task: Task[Any, Any]) -> None:
        """Binds a task to this bridge's queue."""
        task.bind_to(self)
        self._tasks[task.name] = task

    def signature(
        self, name: str, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *, immutable: bool = False,
        **options: Unpack[CallOptions],
    ) -> Signature[Any]:  # fmt: skip
        """Raises UnknownTarget unless a task of this name is declared here: a free name enqueues nothing (D3)."""
        return self._known(name).signature(args, kwargs, immutable=immutable, **options)

    def send_task(
        self, name: str, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]
    ) -> AsyncResult[Any]:  # fmt: skip
        """``apply_async`` of the task of this name. Raises UnknownTarget."""
        return self._known(name).apply_async(args, kwargs, **options)

    def _known(self, name: str) -> Task[Any, Any]:
        found = self._tasks.get(name)
        if found is None:
            near = difflib.get_close_matches(str(name)[:200], self._tasks, n=1, cutoff=0.6)
            raise UnknownTarget(
                f"no task {str(name)[:200]!r} is declared on this Bridge" + (f"; there is {near[0]!r}" if near else "")
            )
        return found

    def __repr__(self) -> str:
        return f"<Bridge of {self.module}: {len(self._tasks)} tasks>"


def _zone(name: object) -> tzinfo:
    try:
        return fixed.utc if name == "UTC" else ZoneInfo(name)  # type: ignore[arg-type]
    except (TypeError, ValueError, OSError, KeyError):
        raise ConfigError(f"timezone must be an IANA name like Europe/Berlin; got {describe(name)}") from None


def _decorated(
    function: Callable[..., Any] | None, bind: bool, options: Mapping[str, Any], add: Callable[[Task[Any, Any]], None]
) -> Any:
    if not isinstance(bind, bool):
        raise InvalidTarget(f"bind is True or False; got {describe(bind)}")

    def decorate(function: Callable[..., Any]) -> Task[Any, Any]:
        task: Task[Any, Any] = Task(function, options, bind=bind)
        add(task)
        return task

    return decorate if function is None else decorate(function)


class _Shared:
    """The shared tasks of this process, and the bridges that would take them."""

    def __init__(self) -> None:
        self.tasks: list[Task[Any, Any]] = []
        self.bridges: list[Bridge] = []
        self._lock = threading.RLock()

    def take(self, bridge: Bridge) -> None:
        with self._lock:
            self._check([*self.bridges, bridge], self.tasks)
            for task in self.tasks:
                bridge.add(task)
            self.bridges.append(bridge)

    def add(self, task: Task[Any, Any]) -> None:
        with self._lock:
            self._check(self.bridges, [task])
            if self.bridges:
                self.bridges[0].add(task)
            self.tasks.append(task)

    @staticmethod
    def _check(bridges: Sequence[Bridge], tasks: Sequence[Task[Any, Any]]) -> None:
        if len(bridges) > 1 and tasks:
            raise ConfigError(
                f"shared tasks ({tasks[0].name!r} is one) belong to one Bridge, and there are those of "
                f"{' and '.join(b.module for b in bridges)}; say Bridge(queue, shared=False) to the others"
            )


_shared = _Shared()


@overload
def shared_task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def shared_task(*, bind: Literal[True], **options: Unpack[TaskOptions]) -> DeclareBound: ...
@overload
def shared_task(*, bind: Literal[False] = False, **options: Unpack[TaskOptions]) -> Declare: ...
def shared_task(function: Callable[..., Any] | None = None, /, *, bind: bool = False, **options: Any) -> Any:
    """``bridge.task`` for a library: bound to the process's only Bridge, whether that is made before or after. Raises ConfigError,
    naming the bridges, where there are several."""
    return _decorated(function, bind, options, _shared.add)


def _canvas(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(
            f"{name}: canvas cannot be kept durable here; call each task's delay(...), in using(...) where they belong together"
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Raises NotSupported."
    return refuse


group, chain, chord, chunks = (_canvas(name) for name in ("group", "chain", "chord", "chunks"))
