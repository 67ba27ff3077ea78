"""The Celery app and its tasks. They may run twice, as any task may whose worker was killed, so each notes what it did once."""

from __future__ import annotations

import os
import time

from celery import Celery
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session

from examples.fastapi_shop.database import URL, Event, Order, url_for

# The line that changed: the broker was "redis://localhost:6379/0".
celery = Celery("shop", broker=f"dbqueue+{URL}")
celery.conf.update(
    # Seconds after which a killed worker's messages come back; a live worker's never do, however long they take.
    broker_transport_options={"lease": float(os.environ.get("SHOP_LEASE", "60"))},
    task_ignore_result=True,
    beat_schedule={
        "count-orders": {
            "task": "examples.fastapi_shop.tasks.count_orders",
            "schedule": float(os.environ.get("SHOP_COUNT_EVERY", "3600")),
        }
    },
)
engine = create_engine(url_for("pysqlite", "psycopg"))


def note(number: int | None, what: str) -> None:
    with Session(engine) as session, session.begin():
        if number is None or not session.scalar(select(Event.id).filter_by(order_id=number, what=what)):
            session.add(Event(order_id=number, what=what))


@celery.task
def send_receipt(number: int) -> None:
    with Session(engine) as session:
        session.get_one(Order, number)  # it is there: the message was committed together with it
    note(number, "receipt")


@celery.task
def ask_for_review(number: int) -> None:
    note(number, "review")


@celery.task
def reserve(number: int) -> None:
    note(number, "reserved")


@celery.task
def pack(number: int) -> None:
    note(number, "packed")


@celery.task(acks_late=True, reject_on_worker_lost=True)
def print_label(number: int) -> None:
    """Takes long, so it acknowledges at its end: if the worker is killed meanwhile, another one prints the label."""
    note(number, "printing")
    time.sleep(float(os.environ.get("SHOP_PRINTER_SECONDS", "0")))
    note(number, "label")


@celery.task
def count_orders() -> None:
    """Every hour, by celery beat."""
    with Session(engine) as session:
        orders = session.scalar(select(func.count(Order.id)))
    note(None, f"{orders} orders")
