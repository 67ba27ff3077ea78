"""Receipts by mail: a job whose handler needs something from outside, which a test does not want to touch."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import dbqueue
from dbqueue import DBQueue, Port

queue = DBQueue()  # the deployment names the database: DBQUEUE_URL, or url in dbqueue.toml


class Mailer(Protocol):
    def send(self, to: str, subject: str) -> None: ...


class MailFolder:
    """Where a real program would talk SMTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def send(self, to: str, subject: str) -> None:
        (self.folder / f"{to}.txt").write_text(subject, encoding="utf-8")


mailer: Port[Mailer] = Port("mailer", lambda: MailFolder(Path(os.environ["MAIL_FOLDER"])))


@dataclass(frozen=True)
class Receipt:
    order: int
    email: str


@queue.job(max_attempts=3, timeout=3600, retry=[60, 600])
def send_receipt(receipt: Receipt) -> None:
    mailer.get().send(receipt.email, f"Your order {receipt.order}")


def place_order(shop: sqlite3.Connection, number: int, email: str) -> None:
    """The order and its receipt job commit together, or neither does."""
    with shop, dbqueue.using(shop):
        shop.execute("INSERT INTO orders VALUES (?, ?)", (number, email))
        send_receipt.enqueue(Receipt(number, email), key=f"order:{number}", delay=300)
