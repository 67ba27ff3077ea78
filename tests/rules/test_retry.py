"""Waiting times are exact, never overflow and never exceed their cap."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbqueue.errors import InvalidArgument
from dbqueue.retry import BOUNDS, MAX_DELAY, Backoff, Delays, Retry, parse
from dbqueue.settings import TABLES

pytestmark = pytest.mark.req("D14")

SECOND = 1_000_000


def never() -> float:
    raise AssertionError("random was asked although there is no jitter")


def at(value: float) -> Callable[[], float]:
    return lambda: value


@st.composite
def backoffs(draw: st.DrawFn) -> Backoff:
    base = draw(st.floats(*BOUNDS["base"]))
    return Backoff(base, draw(st.floats(base, MAX_DELAY)), draw(st.floats(*BOUNDS["factor"])), draw(st.floats(0, 1)))


attempts = st.one_of(st.integers(1, 120), st.integers(1, 10**9), st.integers(10**9, 10**400))


# -- Backoff -----------------------------------------------------------------------------------------------------------


def test_the_documented_rows() -> None:
    backoff = Backoff(base=1, maximum=300)
    assert [backoff.delay_us(n, never) // SECOND for n in range(1, 12)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert [Backoff(0.5, 10, factor=3).delay_us(n, never) for n in (1, 2, 3, 4)] == [
        500_000,
        1_500_000,
        4_500_000,
        10**7,
    ]
    assert [Backoff(5, 60, factor=1).delay_us(n, never) for n in (1, 2, 10**9, 10**400)] == [5 * SECOND] * 4


@given(backoff=backoffs(), attempt=attempts, share=st.floats(0, 1))
def test_between_zero_and_the_cap(backoff: Backoff, attempt: int, share: float) -> None:
    delay = backoff.delay_us(attempt, at(share))
    assert type(delay) is int
    assert 0 <= delay <= round(backoff.maximum * SECOND)


@given(backoff=backoffs(), attempt=st.integers(1, 60))
def test_against_exact_arithmetic(backoff: Backoff, attempt: int) -> None:
    exact = min(Fraction(backoff.maximum), Fraction(backoff.base) * Fraction(backoff.factor) ** (attempt - 1))
    # 1e-12 of seven days is below a microsecond; the other half is the rounding.
    assert abs(backoff.delay_us(attempt, at(0.0)) - exact * SECOND) <= Fraction(1, 2) + exact * SECOND / 10**12


@given(backoff=backoffs(), attempt=attempts)
def test_never_shorter_after_more_attempts(backoff: Backoff, attempt: int) -> None:
    # A microsecond of slack: pow() is exact to an ulp, not monotone by promise.
    assert backoff.delay_us(attempt + 1, at(0.0)) >= backoff.delay_us(attempt, at(0.0)) - 1


@given(backoff=backoffs(), attempt=attempts, share=st.floats(0, 1))
def test_jitter_shortens_by_at_most_its_share(backoff: Backoff, attempt: int, share: float) -> None:
    full = backoff.delay_us(attempt, at(0.0))
    delay = backoff.delay_us(attempt, at(share))
    assert full * (1 - backoff.jitter) - 1 <= delay <= full


def test_jitter_reaches_both_ends() -> None:
    backoff = Backoff(10, 300, jitter=0.25)
    assert backoff.delay_us(1, at(0.0)) == 10 * SECOND
    assert backoff.delay_us(1, at(1.0)) == 7_500_000
    assert Backoff(10, 300, jitter=1).delay_us(1, at(1.0)) == 0
    assert 7_500_000 <= backoff.delay_us(1) <= 10 * SECOND


@pytest.mark.parametrize("attempt", [10**9, 10**400])
@pytest.mark.parametrize("factor", [1.0000001, 2.0, 1_000.0])
def test_no_overflow(attempt: int, factor: float) -> None:
    assert Backoff(0.001, MAX_DELAY, factor).delay_us(attempt, never) == 604_800 * SECOND


# -- Delays ------------------------------------------------------------------------------------------------------------


def test_delays_in_order_then_the_last() -> None:
    delays = Delays([1, 0.25, 60])
    assert [delays.delay_us(n, never) for n in (1, 2, 3, 4, 10**9)] == [1_000_000, 250_000, *[60_000_000] * 3]
    assert Delays([0]).delay_us(1) == 0


@given(st.lists(st.floats(0, MAX_DELAY), min_size=1, max_size=100), attempts)
def test_any_delays(seconds: list[float], attempt: int) -> None:
    delay = Delays(seconds).delay_us(attempt, never)
    assert delay == round(seconds[min(attempt, len(seconds)) - 1] * SECOND)


def test_delays_keep_their_own_copy() -> None:
    seconds = [1, 2]
    delays = Delays(seconds)
    seconds[0] = 99
    assert delays == Delays((1, 2))
    assert hash(delays) == hash(Delays((1, 2)))
    assert delays.delay_us(1) == SECOND


# -- what is refused ---------------------------------------------------------------------------------------------------

NO_NUMBERS: list[Any] = [
    True,
    None,
    "1",
    [1],
    1j,
    float("nan"),
    float("inf"),
    -float("inf"),
    -1,
    pytest.param(10**5000, id="huge"),
]


@pytest.mark.parametrize("name", ["base", "maximum", "factor", "jitter"])
def test_backoff_bounds(name: str) -> None:
    low, high = BOUNDS[name]
    others = {"base": {"maximum": MAX_DELAY}, "maximum": {"base": 0.001}}.get(name, {})
    for value in (low, high):
        assert getattr(Backoff(**{"base": 1, "maximum": 300, **others, name: value}), name) == value
    for value in (low - 0.0001, high + 0.0001):
        with pytest.raises(
            InvalidArgument, match=rf"^Backoff\({name}=\.\.\.\) must be a number .*; got float {value}\."
        ):
            Backoff(**{"base": 1, "maximum": 300, **others, name: value})


@pytest.mark.parametrize("name", ["base", "maximum", "factor", "jitter"])
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_backoff_wants_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"^Backoff\({name}=\.\.\.\) must be a number from .*; got "):
        Backoff(**{"base": 1, "maximum": 300, name: value})


def test_backoff_cap_is_not_below_base() -> None:
    assert Backoff(5, 5).delay_us(9) == 5 * SECOND
    with pytest.raises(InvalidArgument, match=r"^Backoff\(maximum=\.\.\.\) must not be below base: 4 is below 5\."):
        Backoff(5, 4)


@pytest.mark.parametrize("value", [MAX_DELAY + 0.001, -0.001, *NO_NUMBERS])
def test_wrong_delay(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^Delays\(seconds\)\[1\] must be a number from 0 to 604800; got "):
        Delays([1, value])


@pytest.mark.parametrize("seconds", [[], (), [1] * 101])
def test_wrong_number_of_delays(seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^Delays\(seconds\) must have 1 to 100 entries; it has \d+\."):
        Delays(seconds)


@pytest.mark.parametrize("seconds", ["15", {1, 2}, {1: 2}, 5, None, iter([1])])
def test_delays_are_a_list(seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^Delays\(seconds\) must be a list or tuple; got \w+\."):
        Delays(seconds)


@pytest.mark.parametrize("attempt", [0, -1, 1.0, True, "1", None])
@pytest.mark.parametrize("retry", [Backoff(1, 2), Delays([1])])
def test_wrong_attempt(attempt: Any, retry: Retry) -> None:
    with pytest.raises(InvalidArgument, match=r"^attempt must be an int from 1"):
        retry.delay_us(attempt)


# -- what @queue.job(retry=...) accepts --------------------------------------------------------------------------------

DEFAULT = Backoff(1, 300)


@pytest.mark.req("D1")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, DEFAULT),
        (Backoff(2, 9), Backoff(2, 9)),
        (Delays([3]), Delays([3])),
        ([1, 5, 60], Delays([1, 5, 60])),
        ((1, 2.5), Delays([1, 2.5])),
        (7, Delays([7])),
        (0.5, Delays([0.5])),
        (0, Delays([0])),
    ],
)
def test_parse(value: object, expected: Retry) -> None:
    assert parse(value, DEFAULT) == expected


@pytest.mark.req("D1")
@pytest.mark.parametrize("value", [True, False, "5", b"5", {1}, {"base": 1}, object(), Backoff, 1j])
def test_parse_refuses(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^retry must be None, a Backoff, .*; got \w+\."):
        parse(value, DEFAULT)


@pytest.mark.req("D1")
@pytest.mark.parametrize("value", [-1, MAX_DELAY + 1, float("nan"), [], [1, True], [1, "2"]])
def test_parse_refuses_wrong_seconds(value: object) -> None:
    with pytest.raises(InvalidArgument):
        parse(value, DEFAULT)


@pytest.mark.req("D17")
def test_every_legal_setting_makes_a_backoff() -> None:
    base, maximum = TABLES["jobs"]["retry_base_ms"], TABLES["jobs"]["retry_max_ms"]
    for base_ms, maximum_ms in ((base.low, base.low), (base.low, maximum.high), (base.high, maximum.high)):
        assert Backoff(base_ms / 1_000, maximum_ms / 1_000).delay_us(1) == base_ms * 1_000
