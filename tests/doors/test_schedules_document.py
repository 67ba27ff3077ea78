"""docs/schedules.md says what is true: its Python runs, its commands succeed, its table of specs is what cron makes of them."""

from __future__ import annotations

import re
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from dbqueue import DBQueue, cron, events
from dbqueue.clock import to_datetime, to_instant
from dbqueue.errors import InvalidSpec
from dbqueue.runtime import beat
from dbqueue.schedules import CATCH_UP, CRON_SLOTS, EVERY_SLOTS, ON_TIME, SET_ASIDE
from tests.doors.conftest import ROOT, Run
from tests.schedules.lab import Lab, instant

DOCUMENT = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
CODE: list[str] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"```\n(dbqueue .*?)```", DOCUMENT, re.DOTALL) for line in block.strip().splitlines()
]


def test_the_table_of_contents() -> None:
    titles = re.findall(r"^## (.*)$", DOCUMENT, re.MULTILINE)
    assert re.findall(r"^\* \[(.*)\]\(#", DOCUMENT, re.MULTILINE) == titles
    for title, anchor in re.findall(r"^\* \[(.*)\]\(#(.*)\)$", DOCUMENT, re.MULTILINE):
        assert anchor == title.lower().replace(" ", "-")


def module(url: str, last: int | None = None) -> str:
    return "\n".join(CODE[:last]).replace("postgresql://shop@db/shop", url)


def test_its_code_runs(queue: DBQueue, database_url: str) -> None:
    namespace: dict[str, object] = {"__name__": "shop"}
    sys.modules["shop"] = type(sys)("shop")
    sys.modules["shop"].__dict__.update(namespace)
    exec(module(database_url), sys.modules["shop"].__dict__)
    found = {schedule.name: schedule for schedule in queue.schedules()}
    assert set(found) == {"sweep", "welcome customer 7", "report south", "prices"}
    assert (found["prices"].catch_up, found["prices"].max_age) == ("latest", 3600)
    assert (found["report south"].key, found["report south"].priority) == ("report south", 7)
    assert [job.source for job in queue.jobs()] == ["sweep"]
    sys.modules["shop"].queue.close()


def test_its_commands_succeed(
    cli: Run, queue: DBQueue, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    declared = next(n for n, block in enumerate(CODE) if "queue.periodic" in block)
    code = CODE[0] + CODE[declared]
    (tmp_path / "shop" / "jobs.py").write_text(code.replace("postgresql://shop@db/shop", database_url))
    monkeypatch.setenv("DBQUEUE_URL", database_url)
    monkeypatch.setattr(beat.Beat, "run", lambda self: self.start() or self.close())
    queue.schedule("sweep", "@every 5m", "sweeps", 1)
    assert len(COMMANDS) == 11
    for command in COMMANDS:
        for name in ("shop.jobs", "shop"):
            sys.modules.pop(name, None)
        words = shlex.split(command.replace("postgresql://shop@db/shop", database_url))
        answer = cli(*words[1:])
        assert answer.code == 0, (command, answer)
    assert [schedule.name for schedule in queue.schedules()] == ["sweep"]
    assert "DBQUEUE_URL" in DOCUMENT


def test_its_plain_sql_is_noticed(lab: Lab) -> None:
    lab.kept("report a", "other")
    (statement,) = re.findall(r"`(UPDATE dbqueue_schedules .*?)`", DOCUMENT)
    lab.sql(statement.replace("%", "%%") if lab.database.dialect.listens else statement)
    lab.run_until("2026-03-02 10:02:00", lab.beat())
    assert (lab.count("report a"), lab.count("other")) == (0, 2)


@pytest.fixture
def lab(database_url: str):  # type: ignore[no-untyped-def]
    lab = Lab(database_url)
    yield lab
    lab.close()


DUE = {
    "*/15 * * * *": ["2026-03-02 10:15", "2026-03-02 10:30", "2026-03-02 10:45", "2026-03-02 11:00"],
    "0 9-17 * * 1-5": ["2026-03-02 11:00", "2026-03-02 12:00", "2026-03-02 13:00", "2026-03-02 14:00"],
    "0 0 1,15 * *": ["2026-03-15 00:00", "2026-04-01 00:00"],
    "0 0 13 * 5": ["2026-03-06 00:00", "2026-03-13 00:00", "2026-03-20 00:00", "2026-03-27 00:00", "2026-04-03 00:00"],
    "0 0 31 * *": ["2026-03-31 00:00", "2026-05-31 00:00", "2026-07-31 00:00"],
    "@every 90s": ["2026-03-02 10:01:30", "2026-03-02 10:03:00"],
}


def test_its_table_of_specs() -> None:
    specs = re.findall(r"^\| `([^`\"]*)` \|", DOCUMENT.split("## Time zones")[0], re.MULTILINE)
    assert specs == list(DUE)
    start = instant("2026-03-02 10:00:00")
    for spec, expected in DUE.items():
        found = cron.parse(spec).anchored(start).slots(start, start + 366 * 86_400_000_000, len(expected))
        assert [f"{to_datetime(slot):%Y-%m-%d %H:%M:%S}".removesuffix(":00") for slot in found] == [
            when if when.count(":") == 1 else when.removesuffix(":00") for when in expected
        ]
    refused = [
        "0 0 * * mon",
        "0 0 * * 7",
        "5/15 * * * *",
        "0 17-9 * * *",
        "*/60 * * * *",
        "@daily",
        "0 0 0 * * *",
        "0 0 30 2 *",
    ]
    for spec in refused:
        with pytest.raises(InvalidSpec):
            cron.parse(spec)
    assert cron.MAX_EVERY == 366 * 86_400


def test_what_it_says_about_daylight_saving() -> None:
    def slots(spec: str, day: str) -> list[str]:
        begin = to_instant(datetime.fromisoformat(f"{day}T00:00:00").replace(tzinfo=timezone.utc))
        berlin = cron.parse(spec, "Europe/Berlin")
        return [f"{to_datetime(slot):%H:%M}" for slot in berlin.slots(begin - 1, begin + 86_399_000_000, 50)]

    assert slots("30 2 * * *", "2026-03-29") == ["01:00"]  # when it is three o'clock there
    assert slots("30 2 * * *", "2026-10-25") == ["00:30"]
    assert len(slots("0 * * * *", "2026-10-25")) == 23


def test_its_numbers_and_names() -> None:
    assert re.findall(r'^\| `"(\w+)"`', DOCUMENT, re.MULTILINE) == list(CATCH_UP)
    assert f"{CRON_SLOTS} in one transaction; of `@every` the first {EVERY_SLOTS}" in DOCUMENT
    assert (ON_TIME, SET_ASIDE, beat.POLL) == (60_000_000, 60_000_000, 1.0)
    assert events.CursorsAhead.__doc__
