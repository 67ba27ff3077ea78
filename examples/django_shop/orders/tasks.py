"""Plain Celery tasks. They may run twice, as any task may whose worker was killed, so each notes what it did only once."""

import time

from celery import shared_task
from django.conf import settings

from orders.models import Event, Order


@shared_task
def send_receipt(number: int) -> None:
    order = Order.objects.get(pk=number)  # it is there: the message was committed together with it
    Event.objects.get_or_create(order=order, what="receipt")


@shared_task
def ask_for_review(number: int) -> None:
    Event.objects.get_or_create(order_id=number, what="review")


@shared_task
def reserve(number: int) -> None:
    Event.objects.get_or_create(order_id=number, what="reserved")


@shared_task
def pack(number: int) -> None:
    Event.objects.get_or_create(order_id=number, what="packed")


@shared_task(acks_late=True, reject_on_worker_lost=True)
def print_label(number: int) -> None:
    """Takes long, so it acknowledges at its end: if the worker is killed meanwhile, another one prints the label."""
    Event.objects.create(order_id=number, what="printing")
    time.sleep(settings.PRINTER_SECONDS)
    Event.objects.get_or_create(order_id=number, what="label")


@shared_task
def count_orders() -> None:
    """Every hour, by celery beat."""
    Event.objects.create(what=f"{Order.objects.count()} orders")
