"""`dbqueue doctor` on schedules: nobody fires them, they cannot be fired, or the clock went back."""

from __future__ import annotations

from typing import Any

import pytest

from dbqueue import DBQueue
from dbqueue.clock import SECOND
from dbqueue.runtime.beat import Beat
from tests.doors.conftest import Run
from tests.factory import now

NAMES = ("beat", "broken_schedules", "cursors")


@pytest.fixture
def look(cli: Run, database_url: str) -> Any:
    def look() -> dict[str, Any]:
        checks = cli("doctor", "--url", database_url, "--json").json["checks"]
        return {check["name"]: check for check in checks if check["name"] in NAMES}

    return look


def statuses(found: dict[str, Any]) -> list[str]:
    return [found[name]["status"] for name in NAMES]


def fire(queue: DBQueue) -> None:
    beat = Beat(queue.database, name="b")
    beat.start()
    try:
        while beat.step() == 0:
            pass
    finally:
        beat.close()


def change(queue: DBQueue, what: str, **values: object) -> None:
    text = queue.database.dialect.portable(f"UPDATE {{schedules}} SET {what}")
    queue.database.run(lambda session: session.execute(text, values))


def test_all_is_well(queue: DBQueue, look: Any) -> None:
    assert statuses(look()) == ["ok"] * 3
    queue.schedule("hourly", "0 * * * *", "mail", 1)
    assert statuses(look()) == ["ok"] * 3  # a beat may be about to start
    fire(queue)
    assert statuses(look()) == ["ok"] * 3


@pytest.mark.parametrize("planned", [True, False])
def test_no_beat_runs(queue: DBQueue, look: Any, planned: bool) -> None:
    queue.schedule("hourly", "0 * * * *", "mail", 1)
    queue.schedule("daily", "0 0 * * *", "mail", 1)
    late = now(queue.database) - 310 * SECOND
    if planned:
        fire(queue)
        change(queue, "next_at = :late WHERE name = 'hourly'", late=late)
    else:
        change(queue, "updated_at = :late WHERE name = 'hourly'", late=late)
    found = look()
    assert statuses(found) == ["failure", "ok", "ok"]
    assert found["beat"]["sentence"].startswith("1 schedule waited 31")
    assert "`dbqueue beat`" in found["beat"]["remedy"]
    change(queue, "next_at = :late, updated_at = :late, owner = 'shop' WHERE name = 'hourly'", late=late)
    assert "Celery app 'shop'" in look()["beat"]["sentence"]
    change(queue, "retired = :yes WHERE name = 'hourly'", yes=True)
    assert statuses(look()) == ["ok"] * 3


def test_four_minutes_are_no_finding(queue: DBQueue, look: Any) -> None:
    queue.schedule("hourly", "0 * * * *", "mail", 1)
    fire(queue)
    change(queue, "next_at = :late", late=now(queue.database) - 240 * SECOND)
    assert statuses(look()) == ["ok"] * 3


def test_a_broken_one(queue: DBQueue, look: Any) -> None:
    for name in ("good", "bad"):
        queue.schedule(name, "0 * * * *", "mail", 1)
    change(queue, "spec = 'nonsense' WHERE name = 'bad'")
    fire(queue)
    found = look()
    assert statuses(found) == ["ok", "warning", "ok"]
    assert found["broken_schedules"]["sentence"] == "1 schedule cannot be fired: 'bad'"
    queue.pause_schedule("bad")
    assert statuses(look()) == ["ok"] * 3


def test_the_clock_went_back(queue: DBQueue, look: Any) -> None:
    queue.schedule("often", "* * * * *", "mail", 1)
    queue.database.clock.advance(7200)
    fire(queue)
    queue.database.clock.advance(-7200)
    found = look()
    assert statuses(found) == ["ok", "ok", "warning"]
    assert "'often'" in found["cursors"]["sentence"]
    assert "dbqueue schedules reset" in found["cursors"]["remedy"]
    queue.reset_schedule("often")
    assert statuses(look()) == ["ok"] * 3
