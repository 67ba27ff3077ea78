"""What a team sees that moves its app to dbqueue, the same for each example (C1, C5)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.examples.lab import Example, Lab
from tests.waiting import wait_for


@pytest.mark.timeout(300)
class Scenarios:
    example: ClassVar[Example]
    orders_table: ClassVar[str]
    events_table: ClassVar[str]

    @pytest.fixture
    def shop(self, database_url: str, tmp_path: Path) -> Iterator[Lab]:
        lab = Lab(self.example, database_url, tmp_path)
        lab.prepare()
        yield lab
        lab.close()

    def rows(self, shop: Lab, table: str, columns: str = "id") -> list[tuple[object, ...]]:
        with shop.queue.database.session() as session:
            return [tuple(row) for row in session.execute(f"SELECT {columns} FROM {table} ORDER BY id")]

    @pytest.mark.req("C1", "C5")
    def test_a_committed_order_is_worked_on(self, shop: Lab) -> None:
        """The web application is there before any worker was; its messages wait in the database."""
        shop.web()
        assert shop.order() == (201, {"order": 1})
        assert shop.counts() == {"pending": 3}
        worker = shop.worker()
        done = shop.wait_for_events(1, "receipt", "packed", "label")
        assert sorted(done) == ["label", "packed", "printing", "receipt", "reserved"]
        assert done.index("reserved") < done.index("packed")
        wait_for(lambda: shop.counts() == {"pending": 1, "acked": 4}, 30, "not all acknowledged")
        assert shop.state_of("ask_for_review") == "pending"
        shop.stop(worker)
        assert shop.counts() == {"pending": 1, "acked": 4}

    @pytest.mark.req("C6")
    def test_our_own_worker_works_on_it(self, shop: Lab) -> None:
        """In child processes, where Django's fixup keeps its connections in order; the rows say how the tasks ended."""
        shop.web()
        assert shop.order() == (201, {"order": 1})
        worker = shop.own_worker()
        done = shop.wait_for_events(1, "receipt", "packed", "label")
        assert sorted(done) == ["label", "packed", "printing", "receipt", "reserved"]
        assert done.index("reserved") < done.index("packed")
        wait_for(lambda: shop.counts() == {"pending": 1, "succeeded": 4}, 30, "not all are done")
        assert shop.state_of("ask_for_review") == "pending"
        shop.stop(worker)
        assert "Traceback" not in shop.log(worker)

    @pytest.mark.req("C5")
    def test_a_declined_order_leaves_neither_row_nor_message(self, shop: Lab) -> None:
        shop.web()
        assert shop.order("declined")[0] == 402
        assert self.rows(shop, self.orders_table) == []
        assert shop.messages() == []
        assert shop.order()[0] == 201
        assert len(self.rows(shop, self.orders_table)) == 1
        assert shop.counts() == {"pending": 3}

    @pytest.mark.req("C5")
    def test_a_web_server_that_is_killed_leaves_both_or_neither(self, shop: Lab) -> None:
        web = shop.web(bank_seconds=0.3)  # so that one of them has sent its messages and not committed

        def order_on_and_on() -> None:
            with contextlib.suppress(OSError, ValueError):  # until it is killed in the middle of one
                while True:
                    shop.order()

        customers = [threading.Thread(target=order_on_and_on) for _ in range(3)]
        for customer in customers:
            customer.start()
        wait_for(lambda: shop.counts().get("pending", 0) >= 9, 60, "nothing is ordered")
        shop.kill(web)
        for customer in customers:
            customer.join()
        assert shop.counts() == {"pending": 3 * len(self.rows(shop, self.orders_table))}

    @pytest.mark.req("C1", "C3")
    def test_an_eta_waits_in_the_database(self, shop: Lab) -> None:
        shop.web(review_after=3600)
        shop.order()
        worker = shop.worker()
        shop.wait_for_events(1, "receipt", "label")
        (far,) = shop.messages("ask_for_review")
        assert (far.state, far.attempt) == ("pending", 0)
        scheduled = shop.celery("inspect", "scheduled", "--json", "--timeout", "2")
        assert scheduled.wait(60) == 0, shop.log(scheduled)
        assert str(far.task_id) not in shop.log(scheduled)
        shop.stop(worker)

        began = time.time()
        called = shop.celery("call", f"{self.example.tasks}.ask_for_review", "--args=[1]", "--countdown=3")
        assert called.wait(60) == 0, shop.log(called)
        shop.worker(pool="solo")
        shop.wait_for_events(1, "review")
        assert time.time() - began >= 3
        wait_for(lambda: {m.state for m in shop.messages("ask_for_review")} == {"pending", "acked"}, 30)
        assert shop.messages("ask_for_review")[0].attempt + shop.messages("ask_for_review")[1].attempt == 1

    @pytest.mark.req("C1", "C4")
    def test_a_killed_workers_task_comes_back(self, shop: Lab) -> None:
        shop.web(lease=2)
        worker = shop.worker(lease=2, printer_seconds=600)
        shop.order()
        shop.wait_for_events(1, "printing")
        shop.kill(worker)
        assert shop.state_of("print_label") == "running", "nobody knows yet"
        shop.worker(lease=2)
        shop.wait_for_events(1, "label")
        wait_for(lambda: shop.state_of("print_label") == "acked", 30)
        assert shop.messages("print_label")[0].lapses == 1

    @pytest.mark.req("C1")
    def test_beat_sends_what_is_due(self, shop: Lab) -> None:
        shop.worker(pool="solo")
        beat = shop.celery("beat", "-s", str(shop.scratch / "schedule"), count_every=1)
        wait_for(
            lambda: ("0 orders",) in self.rows(shop, self.events_table, "what"), 60, "no tick of beat was worked on"
        )
        assert beat.poll() is None
        shop.stop(beat)
