"""Signatures: calls of a task that are made later, in this process. Canvas is not kept: nothing else can be done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from celery_bridge.calls import Call
from celery_bridge.options import NO_CANVAS, call_options
from celery_bridge.results import AsyncResult, EagerResult
from dbqueue.errors import NotSupported, TargetIsNotAValue

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_bridge.declared import Task
    from celery_bridge.options import CallOptions

R = TypeVar("R")


class Signature(Generic[R]):
    """A task with arguments and options for a call that is made later. Arguments of the call come before its own."""

    __dbqueue_target__ = True

    def __init__(
        self,
        task: Task[Any, R],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any],
        *,
        immutable: bool,
    ) -> None:
        call_options(f"a signature of task {task.name!r}", options)
        self.type, self.args, self.kwargs, self.options, self.immutable = task, args, kwargs, options, immutable

    @property
    def task(self) -> str:
        return self.type.name

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult[R]:
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]
    ) -> AsyncResult[R]:
        """``Task.apply_async`` with the arguments and options of both; those of the call win."""
        merged = self.clone(args, kwargs, **options)
        return self.type.apply_async(merged.args, merged.kwargs, **merged.options)

    def apply(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *, throw: bool = False,
        **options: Unpack[CallOptions],
    ) -> EagerResult[R]:  # fmt: skip
        merged = self.clone(args, kwargs, **options)
        return self.type.apply(merged.args, merged.kwargs, throw=throw, **merged.options)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        merged = self.clone(args, kwargs)
        return self.type(*merged.args, **merged.kwargs)

    def clone(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Signature[R]:
        """Another one with more arguments (unless it is immutable) and options."""
        if self.immutable:
            args, kwargs = (), {}
        return Signature(
            self.type, (*(args or ()), *self.args), {**self.kwargs, **(kwargs or {})}, {**self.options, **options},
            immutable=self.immutable,
        )  # fmt: skip

    def set(self, **options: Any) -> Signature[R]:
        """Changes options of this one, and returns it."""
        call_options(f"a signature of task {self.task!r}", options)
        self.options.update(options)
        return self

    @property
    def payload(self) -> Call:
        """What its job would store, for ``queue.schedule(name, spec, task.target, task.s(...).payload)``. Raises TypeError."""
        return self.type._schema.call(self.args, self.kwargs)

    def __repr__(self) -> str:
        return f"<Signature of {self.task}>"  # arguments are not shown: they may be private

    def _no_value(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TargetIsNotAValue(
            f"a signature of task {self.task!r} is no value: it cannot be pickled or put into arguments"
        )

    __reduce__ = __reduce_ex__ = _no_value

    def _no_canvas(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"a signature of task {self.task!r}: canvas cannot be kept durable here; {NO_CANVAS}")

    link = link_error = on_error = __or__ = _no_canvas
