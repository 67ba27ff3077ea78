"""examples/fastapi_shop, run as its users run it."""

from __future__ import annotations

import pytest

from tests.examples.lab import ROOT, Example, Lab
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

    # The broker's part of these two is the same in both shops.
    @pytest.mark.soak
    def test_an_eta_waits_in_the_database(self, shop: Lab) -> None:
        super().test_an_eta_waits_in_the_database(shop)

    @pytest.mark.soak
    def test_a_killed_workers_task_comes_back(self, shop: Lab) -> None:
        super().test_a_killed_workers_task_comes_back(shop)
