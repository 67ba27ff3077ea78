"""`dbqueue schedules`: what each command shows and does, as text and as JSON, and what it refuses."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue
from dbqueue.runtime.beat import Beat
from tests.doors.conftest import Answer, Run

COMMANDS = ("show", "next", "pause", "resume", "reset", "remove", "run-now")

APP = """
from dbqueue import DBQueue
queue = DBQueue("{url}")
queue.periodic("nightly", "{spec}", "reports", "{payload}", timezone="Europe/Berlin")
"""


@pytest.fixture
def schedules(cli: Run, queue: DBQueue, database_url: str) -> Run:
    """`dbqueue schedules ...` on the test's database, which has three."""
    queue.schedule("hourly", "0 * * * *", "reports", {"secret": "p4yload"}, key="k", max_age=3600)
    queue.schedule("zoned", "30 2 * * *", "reports", 1, timezone="Europe/Berlin", catch_up="latest")
    queue.schedule("every", "@every 90s", "reports", 1)

    def run(command: str, *words: object, stdin: str = "") -> Answer:
        return cli("schedules", command, "--url", database_url, *words, stdin=stdin)

    return run


def ok(answer: Answer) -> Answer:
    assert (answer.code, answer.err) == (0, ""), answer
    return answer


def test_list(schedules: Run, queue: DBQueue) -> None:
    queue.pause_schedule("every")
    lines = ok(schedules("list")).out.splitlines()
    assert lines[0].split() == ["NAME", "OWNER", "SPEC", "ZONE", "STATE", "NEXT", "FIRED"]
    cells = {line.split()[0]: line for line in lines[1:]}
    assert list(cells) == ["every", "hourly", "zoned"]
    assert "paused" in cells["every"]
    assert "active" in cells["hourly"]
    assert "Europe/Berlin" in cells["zoned"]
    document = ok(schedules("list", "--json")).json
    assert [(s["name"], s["state"], s["owner"]) for s in document["schedules"]] == [
        ("every", "paused", ""), ("hourly", "active", ""), ("zoned", "active", ""),
    ]  # fmt: skip
    assert "p4yload" not in str(document)


def test_an_empty_list(cli: Run, queue: DBQueue, database_url: str) -> None:
    answer = cli("schedules", "list", "--url", database_url)
    assert (answer.code, answer.out, answer.err) == (0, "", "No schedules.\n")
    assert cli("schedules", "list", "--url", database_url, "--json").json == {"schedules": []}


def test_show(schedules: Run, queue: DBQueue) -> None:
    out = ok(schedules("show", "zoned")).out
    shown = dict(line.split(":", 1) for line in out.splitlines())
    assert shown["name"].strip() == "zoned"
    assert shown["timezone"].strip() == "Europe/Berlin"
    assert "02:30:00+0" in shown["next_slot_in_zone"]
    found = ok(schedules("show", "hourly", "--json")).json
    assert (found["key"], found["max_age"], found["queue"], found["next_slot_in_zone"]) == (
        "k",
        3600.0,
        "reports",
        None,
    )
    assert "payload" not in found
    with queue.database.session() as session:
        session.execute(
            f"UPDATE {queue.database.dialect.names.qualified('schedules')} SET spec = 'nonsense' WHERE name = 'hourly'"
        )
    assert ok(schedules("show", "hourly", "--json")).json["state"] == "broken"


def test_next(schedules: Run) -> None:
    lines = ok(schedules("next", "zoned", "-n", 3)).out.splitlines()
    assert len(lines) == 3
    for line in lines:
        utc, zoned = line.split()
        assert utc.endswith("Z")
        assert zoned[10:19] == "T02:30:00"
    found = ok(schedules("next", "hourly", "-n", 2, "--json")).json
    assert (found["name"], found["timezone"], len(found["next"])) == ("hourly", "UTC", 2)
    assert found["next"][0]["in_zone"] is None
    assert len(ok(schedules("next", "every")).out.splitlines()) == 10
    for count in (0, 1001, "x"):
        assert schedules("next", "every", "-n", count).code == 2


def test_pause_and_resume(schedules: Run, queue: DBQueue) -> None:
    answer = schedules("pause", "hourly")
    assert (answer.code, answer.out, answer.err) == (0, "", "hourly: paused.\n")
    assert queue.get_schedule("hourly").paused  # type: ignore[union-attr]
    assert ok(schedules("resume", "hourly", "--json")).json == {"name": "hourly", "done": "resumed"}
    assert not queue.get_schedule("hourly").paused  # type: ignore[union-attr]


@pytest.mark.parametrize("command", ["reset", "remove"])
def test_what_loses_something_asks_first(schedules: Run, queue: DBQueue, command: str) -> None:
    before = queue.get_schedule("hourly")
    assert schedules(command, "hourly", stdin="n\n").code == 0
    assert queue.get_schedule("hourly") == before
    assert schedules(command, "hourly").code == 2  # nobody answers
    assert queue.get_schedule("hourly") == before
    answer = schedules(command, "hourly", stdin="y\n")
    assert answer.code == 0
    assert f"hourly: {'reset' if command == 'reset' else 'removed'}." in answer.err
    assert queue.get_schedule("hourly") != before
    done = ok(schedules(command, "zoned", "--yes", "--json")).json
    assert done == {"name": "zoned", "done": "reset" if command == "reset" else "removed"}


def test_run_now(schedules: Run, queue: DBQueue) -> None:
    job = queue.get_job(uuid.UUID(ok(schedules("run-now", "every")).out.strip()))
    assert job is not None
    assert (job.queue, job.source, job.sequence) == ("reports", "every", None)
    first = ok(schedules("run-now", "hourly", "--json")).json
    assert first["duplicate"] is False
    again = schedules("run-now", "hourly")
    assert (again.code, again.out) == (0, "")
    assert first["id"] in again.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_schedule_that_is_not_there(schedules: Run, command: str) -> None:
    yes = ["--yes"] if command in ("reset", "remove") else []
    answer = schedules(command, "none", *yes)
    assert (answer.code, answer.out) == (1, "")
    assert "there is no schedule 'none'" in answer.err
    assert "[schedule_not_found]" in answer.err
    assert schedules(command, "none", *yes, "--json").error["error"] == "schedule_not_found"
    assert schedules(command, "dbqueue.x", *yes).code in (1, 2)
    assert schedules(command, *yes).code == 2


def test_what_only_celery_can_do(schedules: Run) -> None:
    answer = schedules("run-now", "some entry", "--owner", "shop")
    assert (answer.code, "name the app with -A" in answer.err) == (2, True)
    assert "there is no schedule 'some entry' of shop" in schedules("show", "some entry", "--owner", "shop").err


def test_adopt(cli: Run, queue: DBQueue, database_url: str) -> None:
    def code(spec: str, payload: str) -> None:
        sys.modules.pop("shop", None)
        Path("shop.py").write_text(APP.format(url=database_url, spec=spec, payload=payload))

    code("0 3 * * *", "one")
    assert ok(cli("schedules", "adopt", "-A", "shop")).out == "nightly\n"
    code("0 4 * * *", "two, and longer")
    refused = cli("beat", "-A", "shop")
    assert refused.code == 2
    assert "[schedule_conflict]" in refused.err
    assert "dbqueue schedules adopt -A" in refused.err
    code("0 4 * * *", "two, and longer")
    found: Any = ok(cli("schedules", "adopt", "-A", "shop", "--json")).json
    assert [(s["name"], s["spec"], s["static"]) for s in found["schedules"]] == [("nightly", "0 4 * * *", True)]
    answer = cli("schedules", "adopt", "--url", database_url)
    assert (answer.code, answer.err) == (0, "The code declares no schedules.\n")


def test_names_that_would_spoil_a_terminal(schedules: Run, queue: DBQueue) -> None:
    names = queue.database.dialect.names.qualified("schedules")
    with queue.database.session() as session:
        session.execute(f"UPDATE {names} SET spec = '\x1b[31m', name = 'a\x1bb' WHERE name = 'every'")
    for command in (("list",), ("list", "--json"), ("show", "hourly")):
        assert "\x1b" not in ok(schedules(*command)).out


def test_nothing_is_made_by_looking(cli: Run, tmp_path: Path) -> None:
    answer = cli("schedules", "list", "--url", f"sqlite:///{tmp_path / 'none.db'}")
    assert answer.code == 4
    assert not (tmp_path / "none.db").exists()


def test_fired_is_counted(schedules: Run, queue: DBQueue) -> None:
    beat = Beat(queue.database, name="b")
    beat.start()
    try:
        while beat.step() == 0:
            pass
        queue.database.clock.advance(95)
        while beat.step() == 0:
            pass
    finally:
        beat.close()
    found = {s["name"]: s["fired"] for s in ok(schedules("list", "--json")).json["schedules"]}
    assert found["every"] == 1
