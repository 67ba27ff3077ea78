"""A shop whose tasks were written for Celery, without Celery."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Protocol

import dbqueue
from celery_bridge import Bridge, Task
from dbqueue import DBQueue, Port

queue = DBQueue()  # the deployment names the database: DBQUEUE_URL, or url in dbqueue.toml
bridge = Bridge(queue, timezone="Europe/Berlin")


class Mailer(Protocol):
    def send(self, to: str, subject: str) -> None: ...


class MailFolder:
    """Where a real program would talk SMTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def send(self, to: str, subject: str) -> None:
        (self.folder / f"{to}.txt").write_text(subject, encoding="utf-8")


mailer: Port[Mailer] = Port("mailer", lambda: MailFolder(Path(os.environ["MAIL_FOLDER"])))


@bridge.task(bind=True, max_retries=5, default_retry_delay=60)
def send_receipt(self: Task[..., None], order: int, email: str, *, copy: bool = False) -> None:
    subject = f"Your order {order}" + (" (copy)" if copy else "")
    try:
        mailer.get().send(email, subject)
    except ConnectionError as error:
        raise self.retry(exc=error, countdown=60 * 2**self.request.retries) from error


@bridge.task(autoretry_for=(ConnectionError,), retry_backoff=True, time_limit=20, expires=3600)
def remind(email: str) -> None:
    mailer.get().send(email, "Your basket waits for you")


def place_order(shop: sqlite3.Connection, number: int, email: str) -> None:
    """The order and its receipt commit together, or neither does."""
    with shop, dbqueue.using(shop):
        shop.execute("INSERT INTO orders VALUES (?, ?)", (number, email))
        send_receipt.delay(number, email)
        send_receipt.apply_async((number, "archive@example.org"), {"copy": True}, countdown=600, priority=0)
