"""examples/django_shop, run as its users run it."""

from __future__ import annotations

from tests.examples.lab import ROOT, Example
from tests.examples.scenarios import Scenarios


class TestDjangoShop(Scenarios):
    example = Example(
        folder=ROOT / "examples" / "django_shop",
        app="config",
        web=("manage.py", "runserver", "--noreload", "127.0.0.1:{port}"),
        tasks="orders.tasks",
        prepare=(("manage.py", "migrate"),),
        form=True,
    )
    orders_table, events_table = "orders_order", "orders_event"
