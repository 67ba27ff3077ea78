"""Calls that do not fit their signature: the error names the option and the remedy, and is one of ours (D1, D3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import pytest

from dbqueue import DBQueue, InvalidArgument, InvalidTarget

queue: Any = DBQueue()


@dataclass(frozen=True)
class Mail:
    to: str


def handler(mail: Mail) -> None: ...


send: Any = queue.job(max_attempts=1, timeout=5)(handler)
AT = datetime(2030, 1, 1, tzinfo=timezone.utc)


@pytest.mark.req("D1")
@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: queue.job(handler), "takes its options in parentheses and by name"),
        (lambda: queue.job(5, 30), "takes its options in parentheses and by name"),
        (lambda: queue.job(), "needs max_attempts and timeout"),
        (lambda: queue.job(max_attempts=5), "needs timeout"),
        (lambda: queue.job(max_attempts=5, timout=30), "has no option 'timout'. The nearest known name is timeout."),
        (lambda: queue.job(max_retries=5, timeout=30), "has no option 'max_retries'. The nearest known name is max_attempts."),
        (lambda: queue.job(max_attempts=5, timeout=30, prio=1), "has no option 'prio'. The nearest known name is priority."),
    ],
)  # fmt: skip
def test_a_declaration(declare: Callable[[], object], told: str) -> None:
    with pytest.raises(InvalidTarget) as caught:
        declare()
    assert str(caught.value).startswith(f"@queue.job {told}")
    assert str(caught.value).endswith(": @queue.job(max_attempts=5, timeout=30) stands above the function")
    assert caught.value.__context__ is None


@pytest.mark.req("D3")
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: send.enqueue(Mail("a"), dealy=5), "enqueue() has no option 'dealy'. The nearest known name is delay."),
        (lambda: send.enqueue(Mail("a"), keys="k"), "enqueue() has no option 'keys'. The nearest known name is key."),
        (lambda: send.enqueue(Mail("a"), "k"), "enqueue() takes its options in parentheses and by name"),
        (lambda: send.enqueue(Mail("a"), payload=1), "enqueue() was given an argument twice"),
        (lambda: send.enqueue_at(), "enqueue_at() needs when"),
        (lambda: send.enqueue_at(AT, Mail("a"), prio=1), "enqueue_at() has no option 'prio'. The nearest known name is priority."),
        (lambda: send.enqueue_many([Mail("a")], key=["k"]), "enqueue_many() has no option 'key'. The nearest known name is keys."),
        (lambda: queue.send("raw"), "send() needs payload"),
        (lambda: queue.send("raw", 1, timeout=5), "send() has no option 'timeout'."),
    ],
)  # fmt: skip
def test_an_enqueue(call: Callable[[], object], told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert str(caught.value).startswith(told)
    assert caught.value.__context__ is None


def test_a_type_error_from_within_stays_one() -> None:
    """It is a defect or the caller's own, and no word about options would help."""

    class Payloads:
        def __iter__(self) -> Any:
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        send.enqueue_many(Payloads())
