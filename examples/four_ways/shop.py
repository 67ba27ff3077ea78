"""The call sites: nothing in here knows which way the tasks run."""

from __future__ import annotations

import sys

import examples.four_ways.app  # noqa: F401  (in a real shop, whatever serves its requests imports it)
from examples.four_ways.tasks import ask_for_review, charge, lose, print_label, reserve, send_receipt


def place_order(number: int) -> None:
    reserve.delay(number)
    reserve.delay(number, gift=True)
    charge.delay(number, declined=2)
    send_receipt.apply_async((number,), expires=3600)
    ask_for_review.apply_async(args=[number], countdown=1)
    print_label.apply_async((number,), {"paper": "A6"}, queue="labels", priority=9)
    print_label.s(number).set(queue="labels").apply_async()
    print_label.s(paper="A5").apply_async((number,), queue="labels")
    lose.si(number).delay()


if __name__ == "__main__":
    for word in sys.argv[1:]:
        place_order(int(word))
