"""Payload records: what is refused at declaration, what comes back, and what no error message may say.

Long, because most of it is tables: one line for each type that is allowed, refused, stored or corrupt.
"""
# ruff: noqa: UP006, UP007, UP035, UP045 - the old spellings of types must work too

import collections.abc
import dataclasses
import math
import re
import sys
import traceback
import types
import typing
from dataclasses import dataclass, field, make_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, Dict, Generic, List, Optional, Tuple, TypeVar, Union
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dbqueue.errors import Code, InvalidPayload, InvalidTarget, QueueError, TargetIsNotAValue
from dbqueue.payload import MAX_PAYLOAD_BYTES, CorruptPayload, ModelId, PayloadSchema, schema_of

quick = settings(
    max_examples=120,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SPY = "hunter2"  # stands for payload content: it may be in no message


class Article: ...


class User: ...


@dataclass(frozen=True)
class Address:
    street: str
    code: Optional[int] = None


@dataclass(frozen=True)
class Publish:
    article_id: ModelId["Article"]
    address: Address
    tags: list[str] = field(default_factory=list)


def one(hint: Any, name: str = "value") -> Any:
    return make_dataclass("Publish", [(name, hint)])


def schema(record: Any) -> PayloadSchema:
    return schema_of(record, target="shop.publish")


def safe(error: QueueError) -> str:
    """The text of an error about a value: it names the target, and neither it nor its traceback has the value (D10)."""
    shown = "".join(traceback.format_exception_only(type(error), error)) + repr(error.__cause__)
    assert error.__suppress_context__ or error.__context__ is None
    assert SPY not in shown
    assert str(error).startswith("target 'shop.publish': ")
    return str(error)


def refusal(record: Any) -> str:
    with pytest.raises(InvalidTarget) as caught:
        schema(record)
    assert caught.value.code is Code.INVALID_TARGET
    assert "'shop.publish'" in str(caught.value)
    return str(caught.value)


def no_fit(record: Any, value: Any) -> str:
    with pytest.raises(InvalidPayload) as caught:
        schema(record).encode(value)
    assert caught.value.code is Code.INVALID_PAYLOAD
    return safe(caught.value)


def corrupt(record: Any, data: bytes) -> str:
    with pytest.raises(CorruptPayload) as caught:
        schema(record).decode(data)
    assert caught.value.code is Code.CORRUPT_PAYLOAD
    return safe(caught.value)


def module_of(source: str) -> Any:
    """A module with string annotations, as a user's file has them."""
    module = types.ModuleType("payload_records_of_a_user")
    sys.modules[module.__name__] = module
    exec("from __future__ import annotations\n" + source, vars(module))
    return module


# -- round trips -------------------------------------------------------------------------------------------------------

ints = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
offsets = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
KEYS: list[tuple[Any, Any]] = [
    (str, texts),
    (int, ints),
    (UUID, st.uuids()),
    (date, st.dates()),
    (ModelId["Article"], ints),
    (ModelId[Article, UUID], st.uuids()),
]
SCALARS: list[tuple[Any, Any]] = [
    *KEYS,
    (None, st.none()),
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bytes, st.binary(max_size=9)),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (datetime, st.datetimes(timezones=offsets)),
    (time, st.times().map(lambda at: at.replace(fold=0))),
    (timedelta, st.timedeltas()),
    (ModelId["Article", str], texts),
]


def record_kind(parts: list[tuple[Any, Any]], as_struct: bool) -> tuple[Any, Any]:
    fields = [(f"part_{index}", hint) for index, (hint, _) in enumerate(parts)]
    record: Any = msgspec.defstruct("Part", fields) if as_struct else make_dataclass("Part", fields)
    return record, st.builds(record, *[values for _, values in parts])


def bigger(kinds: Any) -> Any:
    return st.one_of(
        kinds.map(lambda k: (list[k[0]], st.lists(k[1], max_size=3))),
        kinds.map(lambda k: (Tuple[k[0], ...], st.lists(k[1], max_size=3).map(tuple))),
        st.tuples(kinds, kinds).map(lambda p: (tuple[p[0][0], p[1][0]], st.tuples(p[0][1], p[1][1]))),
        st.tuples(st.sampled_from(KEYS), kinds).map(
            lambda p: (Dict[p[0][0], p[1][0]], st.dictionaries(p[0][1], p[1][1], max_size=3))
        ),
        kinds.map(lambda k: (Optional[k[0]], st.none() | k[1])),
        st.builds(record_kind, st.lists(kinds, max_size=3), st.booleans()),
    )


kinds = st.recursive(st.sampled_from(SCALARS), bigger, max_leaves=4)


def exactly(value: Any) -> Any:
    """Everything that makes two values the same one: ``==`` alone lets 1 be True and 1.0, and Decimal 1.0 be 1.00."""
    if dataclasses.is_dataclass(value):
        return type(value), [exactly(getattr(value, part.name)) for part in dataclasses.fields(value)]
    if isinstance(value, msgspec.Struct):
        return type(value), [exactly(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, (list, tuple)):
        return type(value), [exactly(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, datetime):
        return datetime, value, value.utcoffset()
    return type(value), repr(value)


@pytest.mark.req("D2")
@quick
@given(st.data())
def test_every_allowed_value_comes_back_the_same(data: Any) -> None:
    record, values = record_kind(data.draw(st.lists(kinds, min_size=1, max_size=3)), data.draw(st.booleans()))
    compiled, value = schema(record), data.draw(values)
    stored = compiled.encode(value)
    assert exactly(compiled.decode(stored)) == exactly(value)
    assert compiled.encode(compiled.decode(stored)) == stored
    assert compiled.fingerprint == schema(record).fingerprint


@pytest.mark.req("D9")
@quick
@given(st.binary(max_size=40) | st.from_regex(rb'\{"(article_id|address|tags|x)":[0-9"\[{a]{0,9}\}?', fullmatch=True))
def test_foreign_bytes_never_raise_anything_but_corrupt_payload(data: bytes) -> None:
    with pytest.raises(CorruptPayload):
        schema(Publish).decode(data)


@pytest.mark.req("D2")
@pytest.mark.parametrize(
    ("hint", "value", "stored"),
    [
        (float, 1e300, b"1e300"),
        (float, -0.0, b"-0.0"),
        (float, 5e-324, b"5e-324"),
        (Decimal, Decimal("1.00"), b'"1.00"'),
        (Decimal, Decimal("-0E+999999"), b'"-0E+999999"'),
        (bytes, b"\xff\x00", b'"/wA="'),
        (str, "\x00é\u2028", b'"\\u0000\xc3\xa9\xe2\x80\xa8"'),
        (timedelta, timedelta.min, b'"-P999999999D"'),
        (timedelta, timedelta(microseconds=-1), b'"-PT0.000001S"'),
        (datetime, datetime(2024, 5, 1, 12, tzinfo=timezone.utc), b'"2024-05-01T12:00:00Z"'),
        (datetime, datetime.max.replace(tzinfo=timezone(-timedelta(hours=9))), b'"9999-12-31T23:59:59.999999-09:00"'),
        (ModelId["Article"], 7, b"7"),
        (List[int], [], b"[]"),
        (Tuple[int, ...], (), b"[]"),
        (dict[int, str], {}, b"{}"),
        (dict[int, str], {2: "b", -1: "a"}, b'{"2":"b","-1":"a"}'),
        (list[None], [None], b"[null]"),
        (Optional[bool], None, b"null"),
    ],
)
def test_stored_form_is_pinned(hint: Any, value: Any, stored: bytes) -> None:
    record = one(hint)
    assert schema(record).encode(record(value)) == b'{"value":' + stored + b"}"
    assert exactly(schema(record).decode(b'{"value":' + stored + b"}").value) == exactly(value)


@pytest.mark.req("D2")
def test_a_zone_comes_back_as_its_offset_at_that_instant() -> None:
    zoneinfo = pytest.importorskip("zoneinfo")
    try:
        berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zone data")
    record = one(datetime)
    for fold, hours in ((0, 2), (1, 1)):
        at = datetime(2024, 10, 27, 2, 30, tzinfo=berlin, fold=fold)
        back = schema(record).decode(schema(record).encode(record(at))).value
        assert (back.tzinfo, back.timestamp()) == (timezone(timedelta(hours=hours)), at.timestamp())
    assert "whole minutes" in no_fit(record, record(datetime(1850, 1, 1, tzinfo=berlin)))  # +00:53:28


@pytest.mark.req("D1")
def test_a_target_without_input_stores_null() -> None:
    empty = schema(None)
    assert empty.encode(None) == b"null"
    assert empty.decode(b"null") is None
    assert re.search(r"payload: needs None, got [\w.]+\.Address$", no_fit(None, Address(SPY)))
    for data in (b"", b"{}", b"7"):
        corrupt(None, data)


@pytest.mark.req("D2")
def test_fields_without_init_are_stored_and_post_init_runs_on_the_way_back() -> None:
    @dataclass(frozen=True)
    class Order:
        amount: int
        total: int = field(init=False, default=0)
        seen: typing.ClassVar[list[int]] = []

        def __post_init__(self) -> None:
            self.seen.append(self.amount)
            if self.amount < 0:
                raise LookupError(f"{SPY} {self.amount}")

    order = Order(2)
    object.__setattr__(order, "total", 9)
    stored = schema(Order).encode(order)
    assert stored == b'{"amount":2,"total":9}'
    assert schema(Order).decode(stored) == order
    assert Order.seen == [2, 2]
    assert "__post_init__" in corrupt(Order, b'{"amount":-1,"total":0}')
    assert "(LookupError)" in corrupt(Order, b'{"amount":-1,"total":0}')


@pytest.mark.req("D2")
def test_what_a_struct_configures_does_not_reach_the_bytes() -> None:
    class Plain(msgspec.Struct):
        first_name: str
        age: int = 3

    class Odd(msgspec.Struct, rename="camel", tag="x", omit_defaults=True, array_like=True, frozen=True, kw_only=True):
        first_name: str
        age: int = 3

    assert schema(Odd).encode(Odd(first_name="a")) == schema(Plain).encode(Plain("a")) == b'{"first_name":"a","age":3}'
    assert schema(Odd).decode(b'{"first_name":"a","age":3}') == Odd(first_name="a")
    assert schema(Odd).fingerprint == schema(Plain).fingerprint


@pytest.mark.req("D2")
def test_slots_inheritance_and_keyword_only_fields() -> None:
    @dataclass(slots=True)
    class Parent:
        street: str

    @dataclass(slots=True, kw_only=True)
    class Child(Parent):
        note: bytes = b""
        _private: int = 1

    child = Child("s", note=b"n")
    assert schema(Child).encode(child) == b'{"street":"s","note":"bg==","_private":1}'
    assert schema(Child).decode(schema(Child).encode(child)) == child


@pytest.mark.req("D2")
def test_string_annotations_and_models_that_are_not_importable() -> None:
    user = module_of(
        "from dataclasses import dataclass\nfrom typing import *\nfrom datetime import date\n"
        "from dbqueue.payload import ModelId\n"
        "@dataclass\nclass Inner:\n    date: date\n    ids: list[ModelId['shop.Article']]\n"
        "    unread: ClassVar[Missing] = 0\n"
        "@dataclass\nclass Outer:\n    article_id: ModelId['NoSuchModel'] | None\n    inner: dict[str, Inner]\n"
        "    day: date = date(2024, 1, 1)\n"
        "@dataclass\nclass Lost:\n    good: int\n    model: ModelId[NoSuchModel]\n"
        "@dataclass\nclass Node:\n    next: Optional[Node]\n"
        "@dataclass\nclass Left:\n    right: list[Right]\n"
        "@dataclass\nclass Right:\n    left: Left\n"
        "class Final: pass\n"
    )
    value = user.Outer(7, {"a": user.Inner(date(2024, 1, 2), [1, 2])})
    assert schema(user.Outer).decode(schema(user.Outer).encode(value)) == value
    text = refusal(user.Lost)
    assert "field 'Lost.model': its annotation cannot be resolved (NameError)" in text
    assert 'ModelId["Name"]' in text
    assert "field 'Node.next': a record that contains itself" in refusal(user.Node)
    assert "field 'Left.right[].left': a record that contains itself" in refusal(user.Left)


# -- what is refused at declaration ------------------------------------------------------------------------------------

T = TypeVar("T")


class Color(Enum):
    RED = "red"


class MyInt(int): ...


class SecretStr(str): ...


class DjangoModel:
    _meta = types.SimpleNamespace(concrete_model=None)


class MappedModel:
    __mapper__ = __table__ = None


@dataclass
class MappedRecord:
    id: int
    __table__: typing.ClassVar[Any] = None


class Target:
    __dbqueue_target__ = True


class Pair(typing.NamedTuple):
    left: int


class Shape(typing.TypedDict):
    side: int


@dataclass
class Box(Generic[T]):
    thing: T


class Undecorated(Address): ...


@dataclass
class _Hidden:
    side: int


REFUSED: list[tuple[Any, str]] = [
    (SecretStr, "a secret"),
    (DjangoModel, 'ModelId["DjangoModel"]'),
    (MappedModel, 'ModelId["MappedModel"]'),
    (MappedRecord, 'ModelId["MappedRecord"]'),
    (Target, "a job target is not a value"),
    (Union[int, str], "union other than Optional"),
    (Union[int, str, None], "union other than Optional"),
    (Color, "Enum"),
    (typing.Literal["red"], "Literal"),
    (collections.abc.Callable[[int], None], "a callable"),
    (typing.Callable, "a callable"),
    (Any, "Any and object"),
    (object, "Any and object"),
    (set[int], "a set"),
    (frozenset, "a set"),
    (Shape, "TypedDict"),
    (Pair, "NamedTuple"),
    (T, "type variable"),
    (list, "list without"),
    (List, "without"),
    (dict, "dict without"),
    (tuple, "tuple without"),
    (MyInt, "a subclass of int"),
    (type("MyDict", (dict,), {}), "a subclass of dict"),
    (_Hidden, "a private type"),
    (Undecorated, "decorate it"),
    (Box[int], "Box has no stable encoding"),
    (ModelId, "ModelId needs its model"),
    (ModelId["Article", float], "key is int, str or UUID"),
    (typing.Annotated[int, msgspec.Meta(gt=0)], "msgspec.Meta"),
    (typing.NewType("Meters", int), "Meters has no stable encoding"),
    (complex, "complex has no stable encoding"),
    (collections.abc.Sequence[int], "Sequence has no stable encoding"),
    (type[int], "no stable encoding"),
    (msgspec.Struct, "no stable encoding"),
    (msgspec.Raw, "no stable encoding"),
    (bytearray, "no stable encoding"),
    ("NoSuchName", "cannot be resolved"),
]


@pytest.mark.req("D2")
@pytest.mark.parametrize(("hint", "reason"), REFUSED, ids=lambda v: v if isinstance(v, str) else None)
def test_refused_types_are_named_with_the_path_of_the_field(hint: Any, reason: str) -> None:
    assert re.search(f"^target 'shop.publish': field 'Publish.value': .*{re.escape(reason)}", refusal(one(hint)))
    if isinstance(hint, str):
        return
    assert re.search(f"field 'Publish.address.value': .*{re.escape(reason)}", refusal(one(one(hint), "address")))
    if hint not in (typing.Callable, List):  # on 3.10 typing refuses to subscribe with these
        assert "field 'Publish.value[]': " in refusal(one(list[hint]))
        assert "field 'Publish.value[1]': " in refusal(one(tuple[int, hint]))
        assert "field 'Publish.value[]': " in refusal(one(dict[str, hint]))
        assert "field 'Publish.value[key]': " in refusal(one(dict[hint, int]))


@pytest.mark.req("D1", "D2")
@pytest.mark.parametrize(
    "record", [int, str, dict, list[int], Address | None, Shape, Pair, Color, Any, Address("x"), 7]
)
def test_a_payload_is_one_record(record: Any) -> None:
    assert "payload type '" in refusal(record)


@pytest.mark.req("D2")
@pytest.mark.parametrize(
    "key", [float, bool, bytes, Decimal, datetime, None, Optional[str], list[str], tuple[int, int]]
)
def test_refused_keys(key: Any) -> None:
    assert "field 'Publish.value[key]': not a type for keys" in refusal(one(dict[key, int]))


SECRET_NAMES = [
    "password", "passwd", "pwd", "passphrase", "db_password", "password_hash", "Password", "reset_password_token",
    "secret", "client_secret", "secret_key", "token", "access_token", "refresh_tokens", "token_value", "jwt", "otp",
    "api_key", "apikey", "apiKey", "APIKey", "awsAccessKey", "private_key", "signing_key",
    "credential", "credentials", "user_credentials",
]  # fmt: skip


@pytest.mark.req("D2", "D10")
@pytest.mark.parametrize("name", SECRET_NAMES)
def test_fields_named_like_a_secret_are_refused(name: str) -> None:
    for hint in (str, bytes, Optional[str], list[str], dict[str, str], int, UUID, Address):
        if hint is int and name.endswith("tokens"):
            continue
        text = refusal(one(one(hint, name), "address"))
        assert re.search(f"field 'Publish.address.{name}': the name of a secret.*store the id", text)


@pytest.mark.req("D2")
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *[
            (name, str)
            for name in ("key", "public_key", "cache_key", "tokenizer", "secretary", "compass", "token_type")
        ],
        *[(name, int) for name in ("token_count", "max_tokens", "password_length", "secret_version", "credential_id")],
        ("api_key_ids", list[int]),
        ("password_changed_at", datetime),
        ("token_expires", datetime),
        ("has_password", bool),
        ("token", ModelId["User"]),
        ("secret", Optional[ModelId["User", UUID]]),
    ],
)
def test_fields_about_a_secret_are_free(name: str, hint: Any) -> None:
    schema(one(hint, name))


@pytest.mark.req("D2")
def test_records_that_cannot_be_restored_are_refused() -> None:
    @dataclass
    class WithInitVar:
        kept: int
        passed: dataclasses.InitVar[int]

    @dataclass
    class Single:
        kept: int

        def __new__(cls, *args: Any) -> Any:
            return object.__new__(cls)

    assert "field 'WithInitVar.passed': an InitVar" in refusal(WithInitVar)
    assert "__new__" in refusal(Single)
    assert "a private type" in refusal(_Hidden)


@pytest.mark.req("D2")
def test_real_orm_and_secret_classes_are_recognised() -> None:
    orm = pytest.importorskip("sqlalchemy.orm")
    base = orm.declarative_base()
    column = pytest.importorskip("sqlalchemy").Column(pytest.importorskip("sqlalchemy").Integer, primary_key=True)
    model = type("Invoice", (base,), {"__tablename__": "invoice", "id": column})
    assert 'ModelId["Invoice"]' in refusal(one(model))
    assert 'ModelId["Invoice"]' in refusal(model)


# -- what is refused at enqueue ----------------------------------------------------------------------------------------

UTC = timezone.utc
WRONG: list[tuple[Any, Any, str]] = [
    (int, True, "needs int, got bool"),
    (int, 7.0, "needs int, got float"),
    (int, MyInt(7), "needs int, got "),
    (int, 2**63, "64 bits"),
    (int, -(2**63) - 1, "64 bits"),
    (ModelId["Article"], SPY, "needs int, got str"),
    (ModelId["Article", UUID], 7, "needs UUID, got int"),
    (float, 7, "needs float, got int"),
    (float, math.nan, "finite"),
    (float, -math.inf, "finite"),
    (str, SPY.encode(), "needs str, got bytes"),
    (str, SecretStr(SPY), "needs str, got "),
    (str, SPY + "\ud800", "surrogates"),
    (str, None, "needs str, got NoneType"),
    (bytes, bytearray(SPY.encode()), "needs bytes, got bytearray"),
    (Decimal, Decimal("sNaN"), "finite"),
    (datetime, datetime(2024, 1, 1), "aware"),  # noqa: DTZ001 - that is the point
    (datetime, datetime(2024, 1, 1, tzinfo=timezone(timedelta(seconds=90))), "whole minutes"),
    (datetime, date(2024, 1, 1), "needs datetime, got datetime.date"),
    (date, datetime(2024, 1, 1, tzinfo=UTC), "needs date, got datetime.datetime"),
    (time, time(1, tzinfo=UTC), "without tzinfo"),
    (bool, 1, "needs bool, got int"),
    (None, 0, "needs None, got int"),
    (list[str], (SPY,), "needs list, got tuple"),
    (tuple[str, ...], [SPY], "needs tuple, got list"),
    (tuple[str, str], (SPY,), "needs a tuple of 2, got one of 1"),
    (dict[str, str], [SPY], "needs dict, got list"),
    (Address, {"street": SPY}, "needs Address, got dict"),
    (Address, Undecorated(SPY), "needs Address, got "),
]


@pytest.mark.req("D2", "D10")
@pytest.mark.parametrize(("hint", "value", "reason"), WRONG)
def test_values_of_another_type_are_refused_by_path_and_kind(hint: Any, value: Any, reason: str) -> None:
    record = one(hint)
    assert re.search(f"^target 'shop.publish': field 'Publish.value': .*{reason}", no_fit(record, record(value)))
    outer = one(Optional[record], "address")
    assert "field 'Publish.address.value': " in no_fit(outer, outer(record(value)))


@pytest.mark.req("D2", "D10")
def test_paths_lead_to_the_element_and_keys_are_not_quoted() -> None:
    record: Any = make_dataclass("Publish", [("rows", dict[str, list[tuple[int, Address]]]), ("ids", dict[int, str])])
    wrong: Any = 5
    rows = [(1, Address("x")), (2, Address(wrong))]
    assert "'Publish.rows[...][1][1].street'" in no_fit(record, record({SPY: rows}, {}))
    assert "'Publish.rows[key]'" in no_fit(record, record({SPY.encode(): []}, {}))
    assert "'Publish.ids[key]'" in no_fit(record, record({}, {True: SPY}))
    assert "payload: needs Publish, got str" in no_fit(record, SPY)
    assert "payload: needs Publish, got NoneType" in no_fit(record, None)
    assert "'Publish.rows': is not set" in no_fit(record, object.__new__(record))


@pytest.mark.req("D3")
def test_a_job_target_in_a_payload_names_the_right_call() -> None:
    record = one(str)
    with pytest.raises(
        TargetIsNotAValue, match=r"field 'Publish.value': a job target is not a value; call its enqueue"
    ):
        schema(record).encode(record(Target()))
    with pytest.raises(TargetIsNotAValue, match=r"payload: .*enqueue"):
        schema(record).encode(Target())


@pytest.mark.req("D2")
def test_payloads_are_bounded() -> None:
    record = one(str)
    fits = record("x" * (MAX_PAYLOAD_BYTES - len(b'{"value":""}')))
    assert len(schema(record).encode(fits)) == MAX_PAYLOAD_BYTES
    assert "1048577 bytes" in no_fit(record, record(fits.value + "x"))


# -- what is refused when a stored payload is read ---------------------------------------------------------------------


@pytest.mark.req("D9", "D10")
@pytest.mark.parametrize(
    ("stored", "place"),
    [
        (b"", "payload"),
        (b"null", "payload"),
        (b"garbage hunter2", "payload"),
        (b'{"article_id":7', "payload"),
        (b"\xff\xfe", "payload"),
        (b'{"article_id":' + b"[" * 100_000, "field 'Publish.article_id'"),
        (b'{"article_id":"hunter2"}', "field 'Publish.article_id'"),
        (b'{"article_id":9223372036854775808}', "field 'Publish.article_id'"),
        (b'{"article_id":7,"address":{"street":"s","code":null}}', "payload"),  # the default is not filled in
        (b'{"article_id":7,"address":{"street":7,"code":null}}', "field 'Publish.address.street'"),
        (b'{"article_id":7,"tags":["x",{"hunter2":1}]}', "field 'Publish.tags[1]'"),
        (b'{"article_id":7,"hunter2":1}', "payload"),
        (b'{"article_id":7,"address":{"street":"s","hunter2 - at `$.hunter2`":1}}', "field 'Publish.address'"),
        (b'{"article_id":7,"address":{"hunter2":1}}', "field 'Publish.address'"),
    ],
)
def test_corrupt_payloads_name_the_field_and_nothing_stored(stored: bytes, place: str) -> None:
    assert f"target 'shop.publish': {place}" in corrupt(Publish, stored)


@pytest.mark.req("D9")
@pytest.mark.parametrize(
    ("hint", "stored"),
    [(datetime, b'"2024-01-01T00:00:00"'), (time, b'"01:00:00Z"'), (float, b"1e999"), (UUID, b'"7"'), (int, b"1.5")],
)
def test_stored_values_are_as_strict_as_new_ones(hint: Any, stored: bytes) -> None:
    assert "field 'Publish.value'" in corrupt(one(hint), b'{"value":' + stored + b"}")


# -- fingerprints ------------------------------------------------------------------------------------------------------

GOLDEN: list[tuple[Any, str, str]] = [
    (None, '"null"', "078142db81660eb4dff97144d6399c8f14626605c4f441ee2f7bec9a3bc991ff"),
    (
        one(ModelId["Article"], "article_id"),
        '{"record":[["article_id",{"id":"Article","key":"int"},false]]}',
        "fe3878ab94af4cf5678e90c5d095bca7c78d4a4c35a232c1fc34f80c435862f4",
    ),
    (
        one(ModelId["User"], "article_id"),
        '{"record":[["article_id",{"id":"User","key":"int"},false]]}',
        "1db336185f1ec073e99ec269af872c94cc67cca3488c2e35d3d6d592448c5a7d",
    ),
    (
        Publish,
        '{"record":[["article_id",{"id":"Article","key":"int"},false],'
        '["address",{"record":[["street","str",false],["code",{"optional":"int"},true]]},false],'
        '["tags",{"list_of":"str"},true]]}',
        "36214e9f66caa5838181e793a741b9f186386805c0a4c6b3d8408ef37d83b64b",
    ),
    (
        one(tuple[dict[UUID, Decimal], tuple[timedelta, ...], list[None]]),
        '{"record":[["value",{"tuple":[{"dict":["UUID","Decimal"]},{"tuple_of":"timedelta"},{"list_of":"null"}]},false]]}',
        "ab31ced98bb945d9263cbefb25f6eff3cddb69fc16372e61955bc75179cf52de",
    ),
]


@pytest.mark.req("D2")
@pytest.mark.parametrize(("record", "canonical", "fingerprint"), GOLDEN)
def test_fingerprints_are_pinned(record: Any, canonical: str, fingerprint: str) -> None:
    """A change here blocks every waiting job of every user: raise _FORMAT on purpose, or do not change it."""
    assert schema(record).canonical == f'{{"format":1,"input":{canonical}}}'
    assert schema(record).fingerprint.hex() == fingerprint


@pytest.mark.req("D2")
def test_ids_of_two_models_never_count_as_one_type() -> None:
    hints = [int, str, UUID, ModelId["Article"], ModelId["User"], ModelId["blog.Article"], ModelId["Article", str]]
    hints += [ModelId["Article", UUID], Optional[ModelId["Article"]], list[ModelId["Article"]], list[ModelId["User"]]]
    assert len({schema(one(hint)).fingerprint for hint in hints}) == len(hints)
    assert schema(one(ModelId[Article])).fingerprint == schema(one(ModelId["Article"])).fingerprint
    records = [one(ModelId["Article"]), one(ModelId["User"])]
    assert len({schema(record).encode(record(7)) for record in records}) == 1
    for wrong in (7, "", None, T, ()):
        with pytest.raises(TypeError):
            ModelId[wrong]


@pytest.mark.req("D2")
def test_what_counts_in_a_fingerprint() -> None:
    def of(*fields: Any, name: str = "Publish") -> bytes:
        return schema(make_dataclass(name, fields)).fingerprint

    first = of(("a", int), ("b", str))
    assert first == of(("a", int), ("b", str), name="Other")  # the record's name is not in the bytes
    assert schema_of(Publish, target="other").fingerprint == schema(Publish).fingerprint
    others = [
        of(("b", str), ("a", int)),
        of(("a", int), ("c", str)),
        of(("a", int)),
        of(("a", int), ("b", bytes)),
        of(("a", int), ("b", Optional[str])),
        of(("a", int), ("b", str, "default")),
        of(("a", int), ("b", list[str])),
        of(("a", int), ("b", tuple[str, ...])),
        of(("a", int), ("b", tuple[str])),
        of(("a", int), ("b", dict[str, str])),
        of(("a", int), ("b", dict[int, str])),
        of(("a", int), ("b", one(str))),
        of(("a", int), ("b", one(str, "other"))),
        of(),
        schema(None).fingerprint,
    ]
    assert len({first, *others}) == 1 + len(others)
    assert of(("a", int, 1)) == of(("a", int, 2)) == of(("a", int, field(default_factory=int)))


@pytest.mark.req("D2")
def test_a_schema_is_immutable_and_repeatable() -> None:
    compiled = schema(Publish)
    assert compiled == schema(Publish)
    assert (compiled.record, compiled.target, len(compiled.fingerprint)) == (Publish, "shop.publish", 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        compiled.target = "other"  # type: ignore[misc]
    assert SPY not in repr(compiled)
