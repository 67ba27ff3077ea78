"""One call of a task: what is stored of it, whether it fits the task's signature, and when it is to run.

A call is stored as it was made, ``args`` and ``kwargs``, with the names of the positional parameters that the code had then. It is
bound to the signature twice: where it is made, so that a wrong call raises TypeError before anything is written, and where it
runs, since the code may be another one by then. What no longer binds is blocked with ``schema_mismatch`` (D9); so is what would bind
to other parameters than the caller meant, because they were reordered. A new parameter with a default, one that nobody gave
and that is gone, and a positional one that was renamed fit as before.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

import msgspec

from dbqueue.errors import InvalidArgument, InvalidPayload, InvalidTarget
from dbqueue.payload import MAX_PAYLOAD_BYTES, CorruptPayload, SchemaMismatch, json_copy, names_a_secret
from dbqueue.settings import describe
from dbqueue.targets import MAX_DELAY


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a task's job. ``names``: the positional parameters of the code that wrote it. ``limits``: hard and soft time
    limit in seconds, as the call gave them."""

    args: list[Any]
    kwargs: dict[str, Any]
    names: list[str]
    retries: int = 0
    task_id: str | None = None
    queue: str | None = None
    priority: int | None = None
    headers: dict[str, Any] | None = None
    eta: str | None = None
    expires: str | None = None
    limits: tuple[float | None, float | None] = (None, None)


_FINGERPRINT = hashlib.sha256(b"celery_bridge.Call 1").digest()
"""The same for all tasks: whether a call fits is found by binding it. The number changes when a stored call would be read otherwise."""


class CallSchema:
    """A task's signature in the place of a payload schema."""

    record = Call
    fingerprint = _FINGERPRINT

    def __init__(self, task: str, function: Callable[..., Any], *, bind: bool) -> None:
        """``bind``: the first parameter is the task itself. Raises InvalidTarget for a parameter that would store a secret (D10)."""
        self.task = task
        parameters = list(inspect.signature(function).parameters.values())
        if bind and not (parameters and parameters[0].kind in _POSITIONAL):
            raise InvalidTarget(
                f"task {task!r}: bind=True gives the task as first argument; declare it: def f(self, ...)"
            )
        parameters = parameters[1:] if bind else parameters
        for parameter in parameters:
            if names_a_secret(parameter.name, parameter.annotation):
                raise InvalidTarget(
                    f"task {task!r}: parameter {parameter.name!r} names a secret, and arguments are stored; "
                    "give the id of the row that holds it, and read it inside the task"
                )
        self._signature = inspect.Signature(parameters)
        self._names = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        self._all_names = set(self._signature.parameters)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], **more: Any) -> Call:
        """Raises TypeError as the function itself would, when the arguments do not fit."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.task}(): {error}") from None
        return Call(list(args), dict(kwargs), self._names, **more)

    def changed(
        self, made: Call, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of ``made`` with these in their place. What is given now wins where the other kind gave the same parameter."""
        if args is not None and kwargs is None:
            given = self._names[: len(args)]
            return args, {name: value for name, value in made.kwargs.items() if name not in given}
        if kwargs is not None and args is None:
            left = dict(kwargs)
            names = [*self._names, *[""] * len(made.args)]
            return [left.pop(name, value) for name, value in zip(names, made.args, strict=False)], left
        return made.args if args is None else args, made.kwargs if kwargs is None else kwargs

    def encode(self, value: object, /) -> bytes:
        """The bytes to store. Raises InvalidPayload, naming the argument, TargetIsNotAValue."""
        if not isinstance(value, Call):
            raise InvalidPayload(f"task {self.task!r}: the payload is a signature's: give task.s(...).payload")
        spare = next((f"*{p.name}" for p in self._signature.parameters.values() if p.kind is p.VAR_POSITIONAL), "args")
        names = [*value.names, *[spare] * len(value.args)]
        checked = msgspec.structs.replace(
            value,
            args=[json_copy(self.task, name, item) for name, item in zip(names, value.args, strict=False)],
            kwargs={name: json_copy(self.task, name, item) for name, item in value.kwargs.items()},
            headers=value.headers and json_copy(self.task, "headers", value.headers),
        )
        data = msgspec.json.encode(checked)
        if len(data) > MAX_PAYLOAD_BYTES:
            raise InvalidPayload(
                f"task {self.task!r}: the arguments have {len(data)} bytes, the limit is {MAX_PAYLOAD_BYTES}; "
                "store the data elsewhere and give its id"
            )
        return data

    def decode(self, data: bytes, /) -> Call:
        """Raises CorruptPayload, or SchemaMismatch when the call does not fit the signature of today (D9)."""
        try:
            call = _DECODER.decode(data)
        except Exception as error:  # foreign bytes may fail in any way
            raise CorruptPayload(
                f"task {self.task!r}: the stored call cannot be read ({type(error).__name__})"
            ) from None
        for then, now, _ in zip(call.names, self._names, call.args, strict=False):
            if then != now and (then in self._all_names or now in call.names):
                raise SchemaMismatch(f"task {self.task!r}: the parameters were reordered since the call was stored")
        try:
            self._signature.bind(*call.args, **call.kwargs)
        except TypeError:
            raise SchemaMismatch(f"task {self.task!r}: the stored call does not fit the signature any more") from None
        return call


_DECODER = msgspec.json.Decoder(Call)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# -- when --------------------------------------------------------------------------------------------------------------


def seconds(what: str, value: object) -> float:
    """A number of seconds up to ten years; a negative one means now, as it does to Celery. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value > MAX_DELAY:
        raise InvalidArgument(f"{what} must be a number of seconds up to {MAX_DELAY}; got {describe(value)}")
    return max(0.0, value)


def instant(what: str, value: object, zone: tzinfo) -> datetime:
    """A datetime, or one in ISO format; without a zone it is meant in ``zone``. Raises InvalidArgument."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.removesuffix("Z") + "+00:00" if value.endswith("Z") else value)
        except ValueError:
            raise InvalidArgument(f"{what} is no date and time in ISO format, like 2030-01-31T12:00:00+01:00") from None
    if not isinstance(value, datetime):
        raise InvalidArgument(f"{what} must be a datetime, or its ISO format; got {describe(value)}")
    return value if value.utcoffset() is not None else value.replace(tzinfo=zone)


def until(when: datetime) -> float:
    """Seconds from now by the clock of this process; 0 for what is past."""
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())


def after(delay: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=delay)
