"""examples/fastapi_shop, run as its users run it."""

from __future__ import annotations

from tests.examples.lab import ROOT, Example
from tests.examples.scenarios import Scenarios


class TestFastapiShop(Scenarios):
    example = Example(
        folder=ROOT,
        app="examples.fastapi_shop.tasks",
        web=("-m", "uvicorn", "examples.fastapi_shop.main:app", "--port", "{port}"),
        tasks="examples.fastapi_shop.tasks",
        prepare=(("-m", "examples.fastapi_shop.migrate"),),
    )
    orders_table, events_table = "orders", "events"
