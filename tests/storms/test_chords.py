"""Chords in a storm: workers are killed while thousands of parts return, and each body is published once, with all results (C9)."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import chord

from dbqueue import DBQueue
from tests.transport.shops import Shop
from tests.waiting import wait_for

TASKS = """
@app.task(shared=False, acks_late=True)
def part(n):
    return n

@app.task(shared=False, acks_late=True)
def body(numbers, name):
    note(f"{name} {len(numbers)} {sum(numbers)} {numbers == sorted(numbers)}")
    return sum(numbers)
"""


@dataclass(frozen=True)
class Size:
    chords: int
    parts: int
    workers: int
    kills: int


@pytest.fixture
def make_storm(tmp_path: Path, database_url: str) -> Iterator[Callable[[], Shop]]:
    made: list[Shop] = []

    def make() -> Shop:
        folder = tmp_path / "shop"
        folder.mkdir()
        url = f"dbqueue+{database_url}"
        made.append(Shop(folder, url, {"lease": 2.0}, url, TASKS))
        return made[-1]

    yield make
    for shop in made:
        shop.close()
        module = sys.modules.pop("shop", None)
        if module is not None:
            module.app.close()
        if str(shop.folder) in sys.path:
            sys.path.remove(str(shop.folder))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(Size(3, 30, 2, 1), id="small"),
        # C131 is the middle one.
        pytest.param(Size(30, 100, 2, 4), id="many", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
        pytest.param(Size(1, 2_000, 4, 8), id="great", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.req("C9", "C4")
@pytest.mark.timeout(180)
def test_each_body_is_published_once(make_storm: Callable[[], Shop], database_url: str, size: Size) -> None:
    """C131. Celery: now and then the body of a chord was not called although all of its parts had ended."""
    shop, chance = make_storm(), random.Random(131)
    module: Any = shop.app
    with closing(DBQueue(database_url)) as queue:
        queue.migrate()
        eye = queue.database.open_session()

        def returned() -> int:
            threading.Event().wait(0.02)
            counted = eye.execute("SELECT coalesce(sum(returned), 0) FROM dbqueue_chords")
            return int(counted[0][0])

        def start() -> None:
            shop.celery("worker", "-n", f"w{len(shop.workers)}@shop", "-c", "2", "-l", "INFO")

        for _ in range(size.workers):
            start()
        names = [f"chord{n}" for n in range(size.chords)]
        results = [chord(module.part.s(n) for n in range(size.parts))(module.body.s(name)) for name in names]
        total = size.chords * size.parts
        for kill in range(1, size.kills + 1):
            wait_for(lambda kill=kill: returned() >= kill * total // (size.kills + 1), 300, "the parts do not return")  # type: ignore[misc]
            victim = chance.choice([worker for worker in shop.workers if worker.poll() is None])
            os.killpg(victim.pid, signal.SIGKILL)
            victim.wait()
            start()
        expected = sum(range(size.parts))
        assert [result.get(timeout=300) for result in results] == [expected] * size.chords
        for result in results:
            told = (
                f"SELECT count(*) FROM dbqueue_jobs WHERE task_id = '{result.id}'",
                f"SELECT count(*) FROM dbqueue_finished WHERE task_id = '{result.id}'",
            )
            assert sum(int(eye.execute(statement)[0][0]) for statement in told) == 1, "one message"
        assert returned() == total, "each part counted once"
        assert set(shop.notes) == {f"{name} {size.parts} {expected} True" for name in names}
        eye.close()
