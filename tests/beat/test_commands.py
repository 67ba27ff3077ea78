"""``celery beat -S dbqueue`` and ``dbqueue beat -A`` as real processes, which are killed, and run in several copies and versions."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

import celery
import pytest

from dbqueue import DBQueue
from dbqueue.clock import to_instant
from tests.beat.conftest import Program, check_slots
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

TICK = '{"tick": {"task": "shop.add", "schedule": 1.0, "args": (1, 1), "options": {"dbqueue_catch_up": "all"}}}'


def fired(queue: DBQueue, name: str = "tick", owner: str = "shop") -> int:
    entry = queue.get_schedule(name, owner)
    return 0 if entry is None else entry.fired


def wait_for_fired(queue: DBQueue, more: int, name: str = "tick", owner: str = "shop") -> None:
    wanted = fired(queue, name, owner) + more
    wait_for(lambda: fired(queue, name, owner) >= wanted, 60, f"{name} was not fired {more} times")


@pytest.mark.req("C7", "A4", "D16")
def test_copies_of_both_commands_are_killed(program: Program, queue: DBQueue) -> None:
    """C44. Oban for Python: leadership went by host name, which several processes shared. C61. Celery's beat: a hard stop damaged its
    state file. Here all have one name and no file, and SIGKILL costs no slot."""
    program.write(TICK)
    copies = [program.celery_beat(), program.dbqueue_beat("-n", "same"), program.dbqueue_beat("-n", "same")]
    wait_for_fired(queue, 1)
    for n in range(2):
        program.kill(copies[n])
        wait_for_fired(queue, 1)
        copies[n] = program.celery_beat("--pidfile", f"pid{n}") if n else program.dbqueue_beat("-n", "same")
    for copy in copies:
        program.wait_for_line(copy, "owns the entries")
    for copy in copies:
        assert "stopped" in program.stop(copy)
    assert check_slots(queue, "tick", 1) >= 3
    left = {path.name for path in program.folder.iterdir() if path.suffix != ".dist-info"}
    assert left - {path.name for path in program.logs} <= {
        "shop.py",
        "notes",
        "__pycache__",
    }  # neither a schedule nor a pid


@pytest.mark.req("C7", "A4", "D16")
@pytest.mark.soak
def test_beats_are_killed_all_the_time(program: Program, queue: DBQueue) -> None:
    """C49, C61. Kills at any point of a round: every slot has its message, once."""
    program.write(TICK)
    dice = random.Random(7)
    up: list[subprocess.Popen[bytes]] = []
    for n in range(60):
        up.append(program.celery_beat() if dice.random() < 0.5 else program.dbqueue_beat())
        end = time.monotonic() + dice.uniform(0.2, 2.5)
        wait_for(lambda end=end: time.monotonic() >= end, 10)  # type: ignore[misc]
        if len(up) > 2 or n % 10 == 9:
            program.kill(up.pop(dice.randrange(len(up))))
    for process in up:
        program.kill(process)
    last = program.dbqueue_beat()
    wait_for_fired(queue, 3)
    program.stop(last)
    assert check_slots(queue, "tick", 1) > 60


@pytest.mark.req("C7", "D16")
@pytest.mark.soak
def test_a_rolling_deployment(program: Program, queue: DBQueue) -> None:
    """C46. Two versions run side by side for a while, and the old one comes back. Each slot of what both have is sent once."""
    old, new = (
        TICK.replace("(1, 1)", "(0, 0)"),
        TICK.replace("}}}", '}}, "added": {"task": "shop.add", "schedule": 1, "args": (2, 2)}}'),
    )
    program.write(old)
    beats = [program.celery_beat(), program.dbqueue_beat()]
    wait_for_fired(queue, 2)
    program.write(new)
    for n in range(2):
        beats.append(program.dbqueue_beat() if n else program.celery_beat())
        wait_for_fired(queue, 2)
        if n == 0:
            for stale in beats[:2]:
                program.wait_for_line(stale, "belong to another version of the code")
        program.kill(beats[n])
        wait_for_fired(queue, 1)
    wait_for_fired(queue, 1, "added")
    program.write(old)
    beats.append(program.celery_beat())
    program.wait_for_line(beats[-1], "owns the entries")
    wait_for_fired(queue, 2)
    for beat in beats[2:]:
        program.stop(beat)
    assert check_slots(queue, "tick", 1) >= 8
    added = queue.get_schedule("added", "shop")
    assert added is not None
    assert added.retired


@pytest.mark.req("C7")
def test_a_module_with_both_is_served_by_one_beat(program: Program, queue: DBQueue, database_url: str) -> None:
    """Its schedules and its entries; then each by hand."""
    program.write(
        TICK,
        f"""
        from dbqueue import DBQueue
        queue = DBQueue({database_url!r})
        queue.periodic("own", "@every 1s", "raw", {{}})
        """,
    )
    beat = program.dbqueue_beat("--log-format", "json")
    wait_for(lambda: fired(queue) and fired(queue, "own", ""), 60, "one of them was not fired")
    assert json.loads(program.stop(beat).splitlines()[-1])["message"].startswith("beat ")
    before = fired(queue)
    task_id = program.ended(
        program.python("-m", "dbqueue", "schedules", "run-now", "tick", "--owner", "shop", "-A", "shop")
    ).strip()
    assert task_id in {job.task_id for job in queue.jobs(queue="shop", limit=1_000)}
    assert fired(queue) == before
    refused = program.python("-m", "dbqueue", "schedules", "run-now", "tick", "--owner", "other", "-A", "shop")
    assert refused.wait(60) == 2
    assert "is shop, not other" in program.log(refused)


@pytest.mark.req("C7")
@pytest.mark.databases("sqlite")
@pytest.mark.skipif(celery.VERSION < (5, 7), reason="beat answers since Celery 5.7")
def test_a_beat_answers_remote_control(program: Program) -> None:
    program.write(TICK)
    beat = program.celery_beat("--enable-remote-control", "-n", "beat@shop")
    app = celery.Celery("shop", broker=program.broker_url, set_as_current=False)
    answers = wait_for(lambda: app.control.ping(timeout=2), 60)
    assert [list(answer) for answer in answers] == [["beat@shop"]]
    program.stop(beat)
    app.close()


@pytest.mark.req("C7")
@pytest.mark.databases("sqlite")
def test_another_broker_is_refused_by_both_commands(program: Program) -> None:
    program.write(TICK, 'app.conf.broker_url = "memory://"')
    for process, code in ((program.celery_beat(), 1), (program.dbqueue_beat(), 2)):
        assert process.wait(60) == code
        assert "could not commit together" in program.log(process)


@pytest.mark.req("C7")
@pytest.mark.soak
def test_a_worker_with_a_beat_inside(program: Program, queue: DBQueue) -> None:
    """``celery worker -B --scheduler dbqueue``, as people have it on one machine."""
    program.write(TICK)
    worker = program.worker("-B", "--scheduler", "dbqueue", size=1)
    wait_for(lambda: program.notes.count("add 1 1") >= 3, 60, "the entries were not worked on")
    program.stop(worker)
    entry = queue.get_schedule("tick", "shop")
    assert entry is not None
    assert to_instant(entry.last_slot) > to_instant(entry.anchor)
    assert check_slots(queue, "tick", 1) >= 3


@pytest.mark.req("C7")
@pytest.mark.soak
def test_both_commands_bridge_a_restart_of_the_server(program: Program, postgres: object, queue: DBQueue) -> None:
    program.write(TICK)
    beats = [program.celery_beat(), program.dbqueue_beat()]
    wait_for_fired(queue, 2)
    postgres.restart("immediate")  # type: ignore[attr-defined]
    wait_for(lambda: _again(queue), 60)
    wait_for_fired(queue, 3)
    for beat in beats:
        program.stop(beat)
    assert check_slots(queue, "tick", 1) >= 5


def _again(queue: DBQueue) -> bool:
    try:
        return fired(queue) > 0
    except Exception:
        return False


@pytest.mark.req("C7")
@pytest.mark.databases("sqlite")
def test_an_app_in_a_package(program: Program, queue: DBQueue, broker_url: str) -> None:
    """As Django's projects have it: the app lies in ``proj/celery.py``, and Celery finds it by ``-A proj``."""
    folder: Path = program.folder / "proj"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "celery.py").write_text(
        "from celery import Celery\n"
        f"app = Celery('proj', broker={broker_url!r})\n"
        "app.conf.beat_schedule = {'tick': {'task': 'proj.tick', 'schedule': 1}}\n"
    )
    beat = program.python("-m", "dbqueue", "beat", "-A", "proj")
    wait_for(lambda: fired(queue, owner="proj"), 60)
    program.stop(beat)
    assert check_slots(queue, "tick", 1, "proj") >= 1
