"""Payload records: what a target's input may be made of, its bytes in the row, and its fingerprint (D2).

``schema_of`` walks a record type once, when the target is declared, and compiles three things out of it:

- ``pack``: a checked copy of a value in *wire form*. Records become structs of our own (no defaults, no renames, no
  tags), everything else stays what it is. So nothing that a user's class configures can change the bytes, and a
  value that another thread changes meanwhile is stored as it was checked.
- ``unpack``: the way back. A record is *restored*, as pickle does it: its fields are set (``init=False`` ones too),
  then ``__post_init__`` runs. A dataclass's ``__init__`` is not called.
- the canonical schema, whose SHA-256 is the fingerprint. Fields count (name, type, order, whether there is a
  default), and a ModelId's model. The *names and modules of records do not*: they are not in the bytes, and moving a
  class to another file must not block the jobs that wait. Nor does it count whether it is a dataclass or a Struct.

The bytes are compact UTF-8 JSON; a target without input stores ``null``. Every allowed value comes back equal and of
the same type. Worth knowing: a datetime keeps its instant and UTC offset, but its tzinfo comes back as that fixed
offset; a time of day loses its fold, which means nothing without a date; a dict keeps its order; a default is never
filled in on the way back, because the stored job must not change when the default does. Checks are exact: a bool is no
int, an int is no float, a subclass is not its base.

Secrets never reach the table (D10): a field is refused for a secret's type, or for a secret's *name*, since most
secrets are plain ``str``. See ``_SECRET`` for the words.

Longer than a file should be, because one walk yields check, encoding, decoding and fingerprint of a type together:
apart, the four would drift, and a type that one of them forgets is a job that enqueues and can never run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Union
from uuid import UUID

import msgspec

from dbqueue.errors import Code, InvalidArgument, InvalidPayload, InvalidTarget, QueueError, TargetIsNotAValue

MAX_PAYLOAD_BYTES = 1 << 20
"""1 MiB: claims carry payloads in batches, and a bigger thing belongs in a row or file that the payload names."""

_INT_END = 1 << 63  # a signed 64-bit integer is what every database column and JSON reader of ours can hold
_FORMAT = 1  # part of the fingerprint: raised when the same schema would be written as other bytes

if TYPE_CHECKING:
    from typing_extensions import TypeAliasType, TypeVar

    _Model = TypeVar("_Model")
    _Key = TypeVar("_Key", int, str, UUID, default=int)
    # To a type checker ``ModelId[Model, Key]`` *is* Key: ``Publish(7)`` is correct and ``Publish("7")`` is not.
    ModelId = TypeAliasType("ModelId", _Key, type_params=(_Model, _Key))
else:

    class ModelId:
        """The id of a row of ``Model``, as the type of a record's field (D2); at run time the value is the plain id.

        ``ModelId[Article]`` or ``ModelId["Article"]`` (Article need not be importable) is an int;
        ``ModelId["Article", UUID]`` and ``ModelId["Article", str]`` are the other keys. The model's name is part of
        the fingerprint, so ids of two models never count as one type. Two models of one name? Tell them apart by hand:
        ``ModelId["blog.Article"]``. Raises TypeError for anything but a class or a name.
        """

        def __class_getitem__(cls, item: Any) -> Any:
            model, key = item if isinstance(item, tuple) and len(item) == 2 else (item, int)
            name = model if isinstance(model, str) else getattr(model, "__name__", "")
            if not isinstance(model, (str, type)) or not name.strip():
                raise TypeError('ModelId takes a model class or its name, and the key type: ModelId["Article", UUID]')
            return Annotated[key, _Owner(name.strip())]


class CorruptPayload(QueueError):
    """A stored payload cannot be read as the declared type, or ``__post_init__`` refused it. The job is not run and
    goes to blocked (D9). The message names target and field, never what is stored."""

    code = Code.CORRUPT_PAYLOAD


class SchemaMismatch(CorruptPayload):
    """A stored payload was written for another signature than the code has now (D9). The job is not run and goes to blocked."""

    code = Code.SCHEMA_MISMATCH


@dataclass(frozen=True)
class PayloadSchema:
    """What one target's payload looks like. Immutable, and safe to share between threads."""

    target: str
    record: type | None
    canonical: str
    fingerprint: bytes
    _shape: _Shape = dataclasses.field(repr=False, compare=False)
    _decoder: msgspec.json.Decoder[Any] = dataclasses.field(repr=False, compare=False)

    def encode(self, value: object) -> bytes:
        """The bytes to store; ``None`` is the payload of a target without input.

        Raises InvalidPayload, naming target, field and the kind of value (D10: never the value), when the value
        is not exactly of the declared type or is too large; TargetIsNotAValue for a job target in a payload (D3).
        """
        try:
            data = _ENCODER.encode(self._shape.pack(value))
        except _Refused as refused:
            root = self.record.__name__ + refused.path if self.record and refused.path else ""
            error = TargetIsNotAValue if refused.is_target else InvalidPayload
            raise error(f"target {self.target!r}: {f'field {root!r}' if root else 'payload'}: {refused}") from None
        if len(data) > MAX_PAYLOAD_BYTES:
            raise InvalidPayload(
                f"target {self.target!r}: payload: {len(data)} bytes, the limit is {MAX_PAYLOAD_BYTES}; "
                f"store the data elsewhere and enqueue its id"
            )
        return data

    def decode(self, data: bytes) -> Any:
        """The record that was encoded, or None for a target without input. Raises CorruptPayload (D9)."""
        try:
            wire = self._decoder.decode(data)
        except Exception as error:  # foreign bytes may fail in any way, and none of them may end a worker
            where = self._field_in(error)
            raise CorruptPayload(
                f"target {self.target!r}: {where}: the stored data is not of the declared type ({type(error).__name__})"
            ) from None
        unpack = self._shape.unpack
        try:
            return wire if unpack is None else unpack(wire)
        except Exception as error:
            raise CorruptPayload(
                f"target {self.target!r}: payload: a __post_init__ refused the stored data ({type(error).__name__})"
            ) from None

    def _field_in(self, error: Exception) -> str:
        """msgspec ends its message with a path; taken only if all its words are ours, as keys are stored data."""
        found = _MSGSPEC_PATH.search(str(error))
        if not found or not self.record or any(f'["{w}",' not in self.canonical for w in _WORD.findall(found[1])):
            return "payload"
        return f"field {self.record.__name__ + found[1]!r}"


def schema_of(record_type: type | None, *, target: str) -> PayloadSchema:
    """Compile the payload type of a target; None for a target without input (D1, D2).

    Raises InvalidTarget with the path of the field when the type, or anything in it, is not wire-safe.
    """
    if record_type is None:
        shape = _SCALARS[type(None)]
    else:
        where = _Where(target, _name_of(record_type))
        if reason := _reason_against(record_type):
            where.refuse(reason)
        if not _is_record(record_type):
            where.refuse("a payload is one record", "declare a dataclass or a msgspec.Struct with the values as fields")
        shape = _record(record_type, where)
    canonical = json.dumps({"format": _FORMAT, "input": shape.form}, separators=(",", ":"), sort_keys=True)
    fingerprint = hashlib.sha256(canonical.encode("ascii")).digest()
    return PayloadSchema(target, record_type, canonical, fingerprint, shape, msgspec.json.Decoder(shape.wire))


def json_copy(target: str, argument: str, value: object) -> Any:
    """A checked copy of one argument of a call, which may be any JSON value: None, bool, int, float, str, and lists and dicts of these.
    A tuple becomes a list. Raises InvalidPayload naming target, argument and the kind of value (D10: never the value);
    TargetIsNotAValue for a job target in it (D3)."""
    try:
        return _json(value)
    except _Refused as refused:
        error = TargetIsNotAValue if refused.is_target else InvalidPayload
        raise error(f"target {target!r}: argument {argument + refused.path!r}: {refused}") from None
    except RecursionError:
        raise InvalidPayload(f"target {target!r}: argument {argument!r}: nested too deeply, or in itself") from None


def names_a_secret(name: str, annotation: object = None) -> bool:
    """Whether an argument of this name would store a secret (D10), unless its type says that it is only about one."""
    return _names_a_secret(name, annotation if isinstance(annotation, str) else getattr(annotation, "__name__", ""))


def any_json(target: str) -> PayloadSchema:
    """The schema of payloads that are any JSON value, as ``encode_json`` writes them."""
    canonical = json.dumps({"format": _FORMAT, "input": "any"}, separators=(",", ":"), sort_keys=True)
    fingerprint = hashlib.sha256(canonical.encode("ascii")).digest()
    shape = _Shape("any", Any, lambda value: value)
    return PayloadSchema(target, object, canonical, fingerprint, shape, msgspec.json.Decoder())


def encode_json(what: str, value: object) -> bytes:
    """The bytes of any JSON value. Raises InvalidArgument, naming ``what`` (D10: never the value)."""
    try:
        data = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidArgument(f"{what}: the payload is no JSON value ({type(error).__name__})") from None
    if len(data) > MAX_PAYLOAD_BYTES:
        raise InvalidArgument(f"{what}: the payload has {len(data)} bytes, the limit is {MAX_PAYLOAD_BYTES}")
    return data


# -- the compiled form of a type ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    form: object  # its part of the canonical schema
    wire: Any  # the type that msgspec decodes to
    pack: Callable[[Any], Any]  # value -> checked wire form; raises _Refused
    unpack: Callable[[Any], Any] | None = None  # wire form -> value; None where they are the same


@dataclass(frozen=True)
class _Owner:
    """The mark that ModelId leaves in ``Annotated``."""

    model: str


class _Refused(Exception):
    """A value does not fit. Each level that it passes puts its own step before the path."""

    def __init__(self, reason: str, is_target: bool = False) -> None:
        super().__init__(reason)
        self.path = ""
        self.is_target = is_target

    def under(self, step: str) -> _Refused:
        self.path = step + self.path
        return self


def _mismatch(needed: str, value: object) -> _Refused:
    kind = type(value)
    if hasattr(kind, _TARGET_MARK):
        return _Refused("a job target is not a value; call its enqueue(...) to run it, or store its name", True)
    return _Refused(f"needs {needed}, got {kind.__qualname__ if kind.__module__ == 'builtins' else _full_name(kind)}")


def _exact(kind: type, fits: Callable[[Any], bool] | None = None, otherwise: str = "") -> Callable[[Any], Any]:
    """A check for exactly this type: a subclass would come back as its base, so it is not the same value."""
    needed = "None" if kind is type(None) else kind.__name__

    def pack(value: Any) -> Any:
        if type(value) is not kind:
            raise _mismatch(needed, value)
        if fits is not None and not fits(value):
            raise _Refused(f"needs {otherwise}")
        return value

    return pack


def _json(value: Any) -> Any:
    kind = type(value)
    if kind in (str, int, bool, float, type(None)):
        return _SCALARS[kind].pack(value)
    if kind is list or kind is tuple:
        return [_inside(item, "[]") for item in value]
    if kind is dict:
        return {_inside(key, "{}", str): _inside(item, "{}") for key, item in value.items()}
    if hasattr(kind, "__mapper__") or hasattr(kind, "__table__") or _is_django(kind):
        raise _Refused("an ORM model; give its id, and load it where the job runs")
    raise _mismatch("None, bool, int, float, str, or a list or dict of these", value)


def _inside(value: Any, step: str, kind: type | None = None) -> Any:
    try:
        return _json(value) if kind is None else _SCALARS[kind].pack(value)
    except _Refused as refused:
        raise refused.under(step) from None


def _is_utf8(value: str) -> bool:
    if value.isascii():  # a flag of the string: free
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _has_plain_offset(value: datetime) -> bool:
    """Aware, in whole minutes: RFC 3339 has no seconds in an offset, so 19th-century local times would shift."""
    offset = value.utcoffset()
    return offset is not None and not offset.seconds % 60 and not offset.microseconds


def _scalar(kind: Any, fits: Callable[[Any], bool] | None = None, otherwise: str = "", **limits: Any) -> _Shape:
    wire = Annotated[kind, msgspec.Meta(**limits)] if limits else kind
    return _Shape("null" if kind is type(None) else kind.__name__, wire, _exact(kind, fits, otherwise))


_ENCODER = msgspec.json.Encoder()
_TARGET_MARK = "__dbqueue_target__"  # targets.py sets it on the class of targets; the rules may not import that file
_MSGSPEC_PATH = re.compile(r" - at (?:`key` in )?`\$([\w.\[\]]+)`$")
_WORD = re.compile(r"[^\W\d]\w*")

_SCALARS: dict[type, _Shape] = {
    type(None): _scalar(type(None)),
    bool: _scalar(bool),
    int: _scalar(
        int, lambda v: -_INT_END <= v < _INT_END, "an int of 64 bits; use str or Decimal", ge=-_INT_END, le=_INT_END - 1
    ),
    float: _scalar(float, math.isfinite, "a finite float; JSON has no NaN or infinity"),
    str: _scalar(str, _is_utf8, "a str without lone surrogates; use bytes"),
    bytes: _scalar(bytes),
    UUID: _scalar(UUID),
    Decimal: _scalar(Decimal, Decimal.is_finite, "a finite Decimal"),
    datetime: _scalar(datetime, _has_plain_offset, "an aware datetime, its UTC offset in whole minutes", tz=True),
    date: _scalar(date),
    time: _scalar(time, lambda v: v.tzinfo is None, "a time without tzinfo; use datetime", tz=False),
    timedelta: _scalar(timedelta),
}
_KEYS = ("str", "int", "UUID", "date")  # the types whose text as a JSON key is unambiguous
_ID_KEYS = (int, str, UUID)


# -- declaration: from a type to its shape -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Where:
    target: str
    path: str
    inside: tuple[type, ...] = ()

    def at(self, step: str) -> _Where:
        return dataclasses.replace(self, path=self.path + step)

    def refuse(self, reason: str, remedy: str = "", cause: BaseException | None = None) -> NoReturn:
        subject = "field" if "." in self.path else "payload type"
        text = f"target {self.target!r}: {subject} {self.path!r}: {reason}"
        raise InvalidTarget(f"{text}; {remedy}" if remedy else text) from cause


def _shape(hint: Any, where: _Where) -> _Shape:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is None:  # list[None] keeps it as it is
        return _SCALARS[type(None)]
    if origin is Annotated:
        return _annotated(hint, where)
    if origin is Union or origin is types.UnionType:
        return _optional(args, where)
    if origin in _CONTAINERS and args and args != ((),):  # ((),) is Python 3.10's Tuple[()]
        return _CONTAINERS[origin](args, where)
    if origin is None and isinstance(hint, type) and hint in _SCALARS:
        return _SCALARS[hint]
    reason = _reason_against(hint)
    if reason is None and _is_record(hint):
        return _record(hint, where)
    return where.refuse(reason or f"{_name_of(hint)} has no stable encoding", "" if reason else _ALLOWED)


def _annotated(hint: Any, where: _Where) -> _Shape:
    """ModelId, or a plain type with notes for other programs. msgspec's own limits would hold on one side only."""
    base, *marks = typing.get_args(hint)
    owners = [mark for mark in marks if isinstance(mark, _Owner)]
    if any(isinstance(mark, msgspec.Meta) for mark in marks):
        where.refuse("the limits of msgspec.Meta are not checked here", "check them in __post_init__")
    if not owners:
        return _shape(base, where)
    if len(owners) > 1 or base not in _ID_KEYS:
        where.refuse("a ModelId has one model, and its key is int, str or UUID")
    key = _SCALARS[base]
    return _Shape({"id": owners[0].model, "key": key.form}, key.wire, key.pack)


def _optional(args: tuple[Any, ...], where: _Where) -> _Shape:
    some = [arg for arg in args if arg is not type(None)]
    if len(some) != 1 or len(args) != 2:
        where.refuse("a union other than Optional", "use one type, or one record with optional fields")
    inner = _shape(some[0], where)
    pack_some, unpack_some = inner.pack, inner.unpack

    def pack(value: Any) -> Any:
        return None if value is None else pack_some(value)

    def unpack(wire: Any) -> Any:
        return None if wire is None else unpack_some(wire)  # type: ignore[misc]

    wire = typing.Optional[inner.wire]  # type: ignore[name-defined]  # noqa: UP045 - a value, not an annotation
    return _Shape({"optional": inner.form}, wire, pack, unpack if unpack_some else None)


def _sequence(kind: Any, args: tuple[Any, ...], where: _Where) -> _Shape:
    """list[T] and tuple[T, ...]."""
    item = _shape(args[0], where.at("[]"))
    pack_item, unpack_item, needed = item.pack, item.unpack, kind.__name__

    def pack(value: Any) -> Any:
        if type(value) is not kind:
            raise _mismatch(needed, value)
        packed: list[Any] = []
        try:
            for element in value:
                packed.append(pack_item(element))
        except _Refused as refused:
            raise refused.under(f"[{len(packed)}]") from None
        return packed

    def unpack(wire: Any) -> Any:
        return kind(map(unpack_item, wire))  # type: ignore[arg-type]

    wire = types.GenericAlias(kind, item.wire if kind is list else (item.wire, ...))
    return _Shape({needed + "_of": item.form}, wire, pack, unpack if unpack_item else None)


def _tuple(args: tuple[Any, ...], where: _Where) -> _Shape:
    if len(args) == 2 and args[1] is Ellipsis:
        return _sequence(tuple, args, where)
    items = [_shape(arg, where.at(f"[{index}]")) for index, arg in enumerate(args)]
    packs, unpacks = [item.pack for item in items], [item.unpack for item in items]

    def pack(value: Any) -> Any:
        if type(value) is not tuple:
            raise _mismatch("tuple", value)
        if len(value) != len(packs):
            raise _Refused(f"needs a tuple of {len(packs)}, got one of {len(value)}")
        packed: list[Any] = []
        try:
            for element, pack_item in zip(value, packs, strict=True):
                packed.append(pack_item(element))
        except _Refused as refused:
            raise refused.under(f"[{len(packed)}]") from None
        return packed

    def unpack(wire: Any) -> Any:
        return tuple([part if step is None else step(part) for part, step in zip(wire, unpacks, strict=True)])

    wire = types.GenericAlias(tuple, tuple(item.wire for item in items))
    return _Shape({"tuple": [item.form for item in items]}, wire, pack, unpack if any(unpacks) else None)


def _dict(args: tuple[Any, ...], where: _Where) -> _Shape:
    key, item = _shape(args[0], where.at("[key]")), _shape(args[1], where.at("[]"))
    if (key.form["key"] if isinstance(key.form, dict) and "id" in key.form else key.form) not in _KEYS:
        where.at("[key]").refuse("not a type for keys", "use str, int, UUID, date or a ModelId")
    pack_key, pack_item, unpack_item = key.pack, item.pack, item.unpack

    def pack(value: Any) -> Any:
        if type(value) is not dict:
            raise _mismatch("dict", value)
        step = "[key]"
        packed: dict[Any, Any] = {}
        try:
            for name, element in value.items():
                step = "[key]"
                checked = pack_key(name)
                step = "[...]"  # which key it is would be payload in an error (D10)
                packed[checked] = pack_item(element)
        except _Refused as refused:
            raise refused.under(step) from None
        return packed

    def unpack(wire: Any) -> Any:
        return {name: unpack_item(part) for name, part in wire.items()}  # type: ignore[misc]

    wire = types.GenericAlias(dict, (key.wire, item.wire))
    return _Shape({"dict": [key.form, item.form]}, wire, pack, unpack if unpack_item else None)


_CONTAINERS: dict[Any, Callable[[tuple[Any, ...], _Where], _Shape]] = {
    list: lambda args, where: _sequence(list, args, where),
    tuple: _tuple,
    dict: _dict,
}


def _record(record: Any, where: _Where) -> _Shape:
    if record.__name__.startswith("_"):
        where.refuse("a private type", "a payload outlives the program that wrote it: give the record a public name")
    if record in where.inside:
        where.refuse("a record that contains itself", "store a flat list, or the id of the other record")
    within = dataclasses.replace(where, inside=(*where.inside, record))
    is_struct = issubclass(record, msgspec.Struct)
    defaults = _struct_fields(record) if is_struct else _dataclass_fields(record, where)
    shapes: dict[str, _Shape] = {}
    for name, hint in _hints(record, defaults, where).items():
        shapes[name] = _shape(hint, within.at("." + name))
        if _names_a_secret(name, shapes[name].form):
            within.at("." + name).refuse(
                "the name of a secret, and a payload is stored in clear text",
                "store the id of the row that holds it and read it inside the job; rename the field if it is no secret",
            )
    wire = msgspec.defstruct(
        record.__name__, [(name, shape.wire) for name, shape in shapes.items()], forbid_unknown_fields=True, gc=False
    )
    form = {"record": [[name, shape.form, defaults[name]] for name, shape in shapes.items()]}
    restore = _struct_restorer if is_struct else _dataclass_restorer
    unpack = restore(record, [(name, shape.unpack) for name, shape in shapes.items()])
    return _Shape(form, wire, _record_packer(record, wire, [(n, shape.pack) for n, shape in shapes.items()]), unpack)


def _record_packer(record: type, wire: Any, fields: list[tuple[str, Callable[[Any], Any]]]) -> Callable[[Any], Any]:
    needed = record.__name__

    def pack(value: Any) -> Any:
        if type(value) is not record:
            raise _mismatch(needed, value)
        packed: list[Any] = []
        try:
            for name, pack_field in fields:
                packed.append(pack_field(getattr(value, name)))
        except _Refused as refused:
            raise refused.under("." + fields[len(packed)][0]) from None
        except AttributeError:
            raise _Refused("is not set").under("." + fields[len(packed)][0]) from None
        return wire(*packed)

    return pack


def _dataclass_restorer(record: type, fields: list[tuple[str, Any]]) -> Callable[[Any], Any]:
    new, put, parts_of = object.__new__, object.__setattr__, msgspec.structs.astuple
    post_init = getattr(record, "__post_init__", None)

    def unpack(wire: Any) -> Any:
        value: Any = new(record)
        for (name, step), part in zip(fields, parts_of(wire), strict=True):
            put(value, name, part if step is None else step(part))
        if post_init is not None:
            post_init(value)
        return value

    return unpack


def _struct_restorer(record: Any, fields: list[tuple[str, Any]]) -> Callable[[Any], Any]:
    parts_of = msgspec.structs.astuple

    def unpack(wire: Any) -> Any:
        steps = zip(fields, parts_of(wire), strict=True)
        return record(**{name: part if step is None else step(part) for (name, step), part in steps})

    return unpack


def _struct_fields(record: Any) -> dict[str, bool]:
    """Field -> whether it has a default; ``__struct_defaults__`` is right-aligned."""
    names, defaults = record.__struct_fields__, record.__struct_defaults__
    required = len(names) - len(defaults)
    return {n: i >= required and defaults[i - required] is not msgspec.NODEFAULT for i, n in enumerate(names)}


def _dataclass_fields(record: Any, where: _Where) -> dict[str, bool]:
    for name, field in record.__dataclass_fields__.items():
        if getattr(field, "_field_type", None) is getattr(dataclasses, "_FIELD_INITVAR", object()):
            where.at("." + name).refuse("an InitVar is not kept by the record", "make it a field")
    if record.__new__ is not object.__new__:
        where.refuse("a record with a __new__ of its own cannot be restored", "use a plain dataclass")
    missing = dataclasses.MISSING
    return {
        field.name: field.default is not missing or field.default_factory is not missing
        for field in dataclasses.fields(record)
    }


def _hints(record: type, fields: dict[str, bool], where: _Where) -> dict[str, Any]:
    """The fields' types in order. Resolved one by one: an error names its field, and other annotations are free."""
    raw: dict[str, tuple[type, Any]] = {}
    for owner in reversed(record.__mro__):
        raw.update((name, (owner, hint)) for name, hint in _annotations(owner).items() if name in fields)
    found: dict[str, Any] = {}
    for name in fields:
        owner, hint = raw[name]

        def holder() -> None: ...

        holder.__annotations__ = {"field": hint}
        module = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
        # Names of the module win over the class's own: ``date: date = TODAY`` must find the type, not the default.
        own = {record.__name__: record, **vars(owner)}
        try:
            found[name] = typing.get_type_hints(holder, own, {**own, **module}, include_extras=True)["field"]
        except Exception as error:  # an annotation is code, and it may raise anything
            where.at("." + name).refuse(
                f"its annotation cannot be resolved ({type(error).__name__})",
                'import its names at run time, at module level; for a model write ModelId["Name"]',
                error,
            )
    return found


def _annotations(owner: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):  # evaluated on demand; a name that is missing must not cost the other fields
        import annotationlib

        return annotationlib.get_annotations(owner, format=annotationlib.Format.FORWARDREF)
    annotations: dict[str, Any] = vars(owner).get("__annotations__", {})
    return annotations


# -- what is refused, and why ------------------------------------------------------------------------------------------

_ALLOWED = (
    "use None, bool, int, float, str, bytes, UUID, Decimal, datetime, date, time, timedelta, list[T], tuple[T, ...], "
    "dict[K, V], Optional[T], a dataclass, a msgspec.Struct or ModelId"
)

_SECRET = re.compile(
    r"(?:^|_)(passwords?|passwd|passphrases?|pwd|secrets?|tokens?|jwt|otp|credentials?|creds|apikeys?|"
    r"(?:api|access|private|secret|signing|encryption)_keys?)(?=_|$)"
)
"""Whole words, so ``tokenize``, ``secretary``, ``key``, ``public_key`` and ``cache_key`` are free. Credentials only:
personal data is the application's business. Camel case is read as words. One rule, no switch: a false alarm costs
a rename, a miss costs a password in a table, in its backups and in every replica."""

_ABOUT = re.compile(r"_(ids?|uuid|ref|name|kind|type|version|count|limit|length|policy|reset|required|at|on)$")
"""A last word that says the field is *about* the secret: ``credential_id`` is the very remedy we give."""

_NO_SECRET_FITS = ("null", "bool", "datetime", "date", "time", "timedelta")


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _names_a_secret(name: str, form: Any) -> bool:
    """``form`` is the field's canonical type: ``has_password: bool`` and ``token: ModelId["Token"]`` hold no secret."""
    if isinstance(form, dict) and "optional" in form:
        return _names_a_secret(name, form["optional"])
    words = _snake(name)
    found = _SECRET.search(words)
    if not found or _ABOUT.search(words) or form in _NO_SECRET_FITS or (isinstance(form, dict) and "id" in form):
        return False
    return not (found[1] == "tokens" and form in ("int", "float"))  # max_tokens of a language model is a number


def _is_class(hint: Any) -> bool:
    return isinstance(hint, type) and typing.get_origin(hint) is None  # Python 3.10 calls list[int] a type


def _is_record(hint: Any) -> bool:
    if not _is_class(hint) or hint is msgspec.Struct:
        return False
    return issubclass(hint, msgspec.Struct) or "__dataclass_fields__" in vars(hint)


def _name_of(hint: Any) -> str:
    return str(getattr(hint, "__name__", None) or type(hint).__name__)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _reason_against(hint: Any) -> str | None:
    """Why this type is refused, with the remedy; None when nothing special is known about it."""
    origin = typing.get_origin(hint)
    if isinstance(hint, (str, typing.ForwardRef)):
        return "its annotation cannot be resolved; write the type itself, or import it at run time"
    if hint is Any or hint is object:
        return "Any and object do not say what is stored; name the type"
    if isinstance(hint, (typing.TypeVar, typing.ParamSpec)):
        return "a type variable; a payload has one fixed type, so fill it in"
    if hint is ModelId:
        return 'ModelId needs its model; write ModelId["Article"]'
    if origin is typing.Literal:
        return "Literal is refused; declare the type of its values and check them in __post_init__"
    if (origin or hint) is Callable:
        return "a callable cannot be stored; store the data that the job needs to choose it"
    if any((origin or hint) is kind for kind in _CONTAINERS):
        return f"{_name_of(origin or hint)} without the types of its elements; write them in brackets"
    if any((origin or hint) is kind for kind in (set, frozenset)):
        return "a set has no order, so no stable encoding; use a list or a tuple"
    kind = origin or hint
    return _reason_against_class(kind) if isinstance(kind, type) else None


def _is_django(kind: Any) -> bool:
    return hasattr(getattr(kind, "_meta", None), "concrete_model")


def _reason_against_class(kind: Any) -> str | None:
    if hasattr(kind, _TARGET_MARK):
        return "a job target is not a value; call its enqueue(...), or store its name"
    if hasattr(kind, "__mapper__") or hasattr(kind, "__table__") or _is_django(kind):
        return f'an ORM model; store its id as ModelId["{kind.__name__}"] and load it inside the job'
    if issubclass(kind, Enum):
        return "Enum is refused; store its value, and convert it inside the job"
    if not _is_record(kind) and any(_SECRET.search(_snake(base.__name__)) for base in kind.__mro__):
        return "a secret; store the id of the row that holds it and read it inside the job"
    if typing.is_typeddict(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return "TypedDict and NamedTuple are refused; declare a dataclass"
    for base in (*_SCALARS, *_CONTAINERS):
        if issubclass(kind, base) and kind is not base:
            return f"a subclass of {base.__name__} would come back as {base.__name__}; declare {base.__name__}"
    if dataclasses.is_dataclass(kind) and not _is_record(kind):
        return "a subclass of a dataclass that is none itself; decorate it with @dataclass"
    return None
