"""The tasks. Each may run twice, as any task may whose worker was killed, so what they do is written down once."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import Any

from examples.four_ways.way import shared_task


def happened(order: int, what: str) -> bool:
    """Whether it was not known before."""
    with closing(sqlite3.connect(os.environ["SHOP_FILE"], timeout=30)) as shop, shop:
        shop.execute("CREATE TABLE IF NOT EXISTS events (number INTEGER, what TEXT, PRIMARY KEY (number, what))")
        return shop.execute("INSERT OR IGNORE INTO events VALUES (?, ?)", (order, what)).rowcount == 1


@shared_task
def reserve(order: int, *, gift: bool = False) -> None:
    happened(order, "reserved as a gift" if gift else "reserved")


@shared_task(bind=True, max_retries=3, default_retry_delay=60)
def charge(self: Any, order: int, declined: int) -> None:
    """The bank declines so often."""
    happened(order, f"charge, after {self.request.retries} retries")
    if self.request.retries < declined:
        raise self.retry(countdown=0.1)
    happened(order, "charged")


@shared_task(autoretry_for=(ConnectionError,), max_retries=2, default_retry_delay=0)
def send_receipt(order: int) -> None:
    """The mail server is down when it is first asked."""
    if happened(order, "the mail server is down"):
        raise ConnectionRefusedError
    happened(order, "receipt")


@shared_task(bind=True)
def ask_for_review(self: Any, order: int) -> None:
    happened(order, "asked for a review" if self.request.eta else "asked too early")


@shared_task(name="labels.print", time_limit=20, soft_time_limit=10)
def print_label(order: int, paper: str = "A4") -> None:
    happened(order, f"label on {paper}")


@shared_task(max_retries=0)
def lose(order: int) -> None:
    happened(order, "lost")
    raise LookupError(order)


@shared_task
def price(order: int) -> int:
    return order * 100


@shared_task
def total(prices: list[int]) -> int:
    return sum(prices)
