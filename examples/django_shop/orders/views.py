"""An order and all messages about it are one transaction: a declined card leaves neither."""

import time
from typing import Any

from celery import chain, group
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse
from django.shortcuts import get_object_or_404

import dbqueue
from orders.models import Order
from orders.tasks import ask_for_review, pack, print_label, reserve, send_receipt


class Declined(Exception):
    """The card was declined."""


def create_order(request: HttpRequest) -> HttpResponse:
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    try:
        order = place(request.POST["customer"], int(request.POST["cents"]), request.POST["card"])
    except Declined:
        return JsonResponse({"error": "declined"}, status=402)
    return JsonResponse({"order": order.pk}, status=201)


def place(customer: str, cents: int, card: str) -> Order:
    with transaction.atomic(), dbqueue.using("django:default"):
        order = Order.objects.create(customer=customer, cents=cents)
        send_receipt.delay(order.pk)
        ask_for_review.apply_async((order.pk,), countdown=settings.REVIEW_AFTER)
        chain(reserve.si(order.pk), group(pack.si(order.pk), print_label.si(order.pk))).apply_async()
        charge(card, cents)
    return order


def charge(card: str, cents: int) -> None:
    """The bank's answer comes last, when the order is written and its messages are too."""
    time.sleep(settings.BANK_SECONDS)
    if card == "declined":
        raise Declined


def show_order(request: HttpRequest, number: int) -> HttpResponse:
    order = get_object_or_404(Order, pk=number)
    answer: dict[str, Any] = {"customer": order.customer, "cents": order.cents}
    answer["events"] = list(order.event_set.order_by("pk").values_list("what", flat=True))
    return JsonResponse(answer)
