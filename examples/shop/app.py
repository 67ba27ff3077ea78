"""A shop in one SQLite file: orders, and a receipt for each, written by `dbqueue worker -A examples.shop.app:queue`.

The order's row and its receipt job commit in one transaction, so there is never an order without its receipt or a receipt for
an order that was rolled back.
"""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import dbqueue
from dbqueue import DBQueue, ModelId

FOLDER = Path(os.environ.get("SHOP_FOLDER", "shop-data")).absolute()
DATABASE = FOLDER / "shop.db"
RECEIPTS = FOLDER / "receipts"

# SQLite has one writer at a time, so a lease must be longer than every timeout; a killed worker's jobs come back after it.
queue = DBQueue(f"sqlite:///{DATABASE}", lease=2)


@dataclass(frozen=True)
class Order:
    id: int
    customer: str
    item: str
    quantity: int
    unit_cents: int


@dataclass(frozen=True)
class Receipt:
    order: ModelId[Order]


@queue.job(max_attempts=5, timeout=1.5)
def write_receipt(receipt: Receipt) -> None:
    """Idempotent, as a job that may run again must be: the same order gives the same file, put in place at once."""
    with connect() as shop:
        customer, item, quantity, cents = shop.execute(
            "SELECT customer, item, quantity, quantity * unit_cents FROM orders WHERE id = ?", (receipt.order,)
        ).fetchone()
    shop.close()
    time.sleep(0.03)  # a printer, a mail server, a PDF: something that takes its time
    draft = RECEIPTS / f".{receipt.order}-{os.getpid()}.txt"
    draft.write_text(
        f"Order {receipt.order}\n{customer}: {quantity} x {item}\nTotal {cents / 100:.2f}\n", encoding="utf-8"
    )
    draft.replace(RECEIPTS / f"{receipt.order}.txt")


class Declined(Exception):
    """The card was declined: the order is rolled back, and its receipt job with it."""


def place_order(shop: sqlite3.Connection, order: Order, payment: str) -> None:
    """One transaction: the order and its receipt job, both or neither."""
    with shop, dbqueue.using(shop):
        shop.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", astuple(order))
        write_receipt.enqueue(Receipt(order.id), key=f"order:{order.id}")
        if payment == "declined":
            raise Declined


def connect() -> sqlite3.Connection:
    return sqlite3.connect(DATABASE, timeout=10)


def create() -> None:
    RECEIPTS.mkdir(parents=True, exist_ok=True)
    with connect() as shop:
        shop.execute(
            "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, customer TEXT, item TEXT, quantity INTEGER, unit_cents INTEGER)"
        )
    shop.close()
    queue.migrate()
