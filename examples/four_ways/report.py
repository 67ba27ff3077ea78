"""What needs Celery: a chord, and its result."""

from __future__ import annotations

import sys

import examples.four_ways.app  # noqa: F401
from examples.four_ways.tasks import price, total
from examples.four_ways.way import chord


def turnover(orders: list[int]) -> int:
    return int(chord([price.s(order) for order in orders])(total.s()).get(timeout=30))


if __name__ == "__main__":
    print(turnover([int(word) for word in sys.argv[1:]]))
