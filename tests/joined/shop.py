"""An application that joins: its table of orders, a queue in the same database, and an onlooker who sees what is committed."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

import psycopg

from dbqueue import DBQueue, Target

SECRET = "s3cret-payload"


@dataclass(frozen=True)
class Order:
    number: int
    note: str = ""


class Shop:
    """``ship.enqueue(Order(1))`` is the job; ``orders`` and ``jobs`` tell which numbers another connection sees."""

    def __init__(self, url: str, *, migrated: bool = True, **options: Any) -> None:
        self.url = url
        self.postgres = url.startswith("postgresql")
        self.queue = DBQueue(url, **options)
        self.ship: Target[Order] = self.queue.job(max_attempts=3, timeout=30, name="shop.ship")(_ship)
        if migrated:
            self.queue.migrate()
        self._eye: Any = None
        self.look("CREATE TABLE orders (number integer PRIMARY KEY)")

    @property
    def path(self) -> str:
        return self.url.removeprefix("sqlite:///")

    def connect(self, **options: Any) -> Any:
        """A plain connection of the family's first driver."""
        return psycopg.connect(self.url, **options) if self.postgres else sqlite3.connect(self.path, **options)

    def look(self, statement: str) -> list[Any]:
        """Runs one statement on a connection of the onlooker's, which commits by itself."""
        if self._eye is None or (self.postgres and self._eye.closed):
            self._eye = self.connect(**({"autocommit": True} if self.postgres else {"isolation_level": None}))
        cursor = self._eye.execute(statement)
        return cursor.fetchall() if cursor.description else []

    def clear(self) -> None:
        if self.postgres and self._eye.closed is False:
            try:
                self.look("SELECT 1")
            except psycopg.OperationalError:  # an earlier test stopped the server
                self._eye.close()
        for table in ("orders", "dbqueue_jobs", "dbqueue_finished"):
            self.look(f"DELETE FROM {table}")

    def orders(self) -> list[int]:
        return [row[0] for row in self.look("SELECT number FROM orders ORDER BY number")]

    def jobs(self) -> list[int]:
        rows = self.look("SELECT payload FROM dbqueue_jobs")
        return sorted(json.loads(bytes(row[0]))["number"] for row in rows)

    def both(self) -> tuple[list[int], list[int]]:
        return self.orders(), self.jobs()

    def close(self) -> None:
        self._eye.close()
        self.queue.close()


def _ship(order: Order) -> None:
    raise AssertionError("no test of this folder runs a job")
