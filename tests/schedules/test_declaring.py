"""Declaring schedules: what is refused before the database is asked, and what a declaration does to the one that is there."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dbqueue import (
    DBQueue,
    InvalidArgument,
    InvalidName,
    InvalidPayload,
    InvalidSpec,
    QueueError,
    ReservedName,
    ScheduleNotFound,
    Target,
)
from dbqueue.clock import to_instant
from dbqueue.runtime.worker import Worker, WorkerOptions
from tests.schedules.lab import Lab, instant


@dataclass(frozen=True)
class Report:
    number: int


def declared(queue: DBQueue) -> Target[Report]:
    @queue.job(max_attempts=5, timeout=20, name="tests.report", queue="reports", priority=4, on_crash="fail")
    def report(report: Report) -> None: ...

    return report


SECRET = "s3cret-value"

REFUSED: list[tuple[type[QueueError], str, dict[str, Any]]] = [
    (InvalidName, "schedule name", {"name": ""}),
    (InvalidName, "schedule name", {"name": " a"}),
    (InvalidName, "schedule name", {"name": "a\n"}),
    (InvalidName, "schedule name", {"name": "x" * 201}),
    (InvalidName, "schedule name", {"name": 5}),
    (ReservedName, "schedule name", {"name": "dbqueue.mine"}),
    (InvalidName, "queue name", {"target": ""}),
    (ReservedName, "queue name", {"target": "dbqueue.mine"}),
    (InvalidArgument, "target", {"target": 7}),
    (InvalidArgument, "target", {"target": None}),
    (InvalidSpec, "minute", {"spec": "60 * * * *"}),
    (InvalidSpec, "fields", {"spec": "* * * *"}),
    (InvalidSpec, "@every", {"spec": "@every 0s"}),
    (InvalidSpec, "@every", {"spec": "@every 5"}),
    (InvalidSpec, "0 0 \\* \\* \\*", {"spec": "@daily"}),
    (InvalidSpec, "spec", {"spec": None}),
    (InvalidSpec, "never be due", {"spec": "0 0 30 2 *"}),
    (InvalidSpec, "timezone", {"timezone": "Mars/Olympus"}),
    (InvalidSpec, "timezone", {"timezone": None}),
    (InvalidSpec, "timezone", {"spec": "@every 5m", "timezone": "Europe/Berlin"}),
    (InvalidArgument, "catch_up", {"catch_up": "never"}),
    (InvalidArgument, "catch_up", {"catch_up": None}),
    (InvalidArgument, "max_age", {"max_age": 0}),
    (InvalidArgument, "max_age", {"max_age": True}),
    (InvalidArgument, "max_age", {"max_age": "60"}),
    (InvalidArgument, "max_age", {"max_age": 1e12}),
    (InvalidArgument, "max_age", {"max_age": float("nan")}),
    (InvalidArgument, "key", {"key": ""}),
    (InvalidArgument, "key", {"key": 5}),
    (QueueError, "priority", {"priority": 10}),
    (QueueError, "priority", {"priority": "9"}),
    (QueueError, "max_attempts", {"max_attempts": 0}),
    (QueueError, "max_attempts", {"max_attempts": 1.5}),
    (InvalidArgument, "payload", {"payload": {SECRET: object()}}),
    (InvalidArgument, "payload", {"payload": SECRET * 200_000}),
    (InvalidArgument, "retries", {"retries": 5}),
]


@pytest.mark.parametrize("verb", ["schedule", "periodic"])
@pytest.mark.parametrize(("error", "field", "change"), REFUSED)
@pytest.mark.req("A1", "D15")
def test_what_is_wrong_is_told_before_the_database_is_asked(
    error: type[QueueError], field: str, change: dict[str, Any], verb: str, tmp_path: Path
) -> None:
    path = tmp_path / "none.db"
    given = {"name": "a", "spec": "* * * * *", "target": "raw", "payload": 1} | change
    with closing(DBQueue(f"sqlite:///{path}")) as queue:
        with pytest.raises(error, match=field) as raised:
            getattr(queue, verb)(**given)
        assert SECRET not in "".join(traceback.format_exception(raised.value))
        assert not queue._declared
    assert not path.exists()


@pytest.mark.req("A1")
def test_a_target_checks_its_record(tmp_path: Path) -> None:
    with closing(DBQueue(f"sqlite:///{tmp_path / 'none.db'}")) as queue:
        report = declared(queue)
        with pytest.raises(InvalidPayload):
            queue.schedule("a", "* * * * *", report, {"number": "x"})
        with pytest.raises(InvalidArgument, match="Report"):
            queue.schedule("a", "* * * * *", report)
        with pytest.raises(QueueError, match="priority"):
            queue.schedule("a", "* * * * *", report, Report(1), priority=11)
        with pytest.raises(QueueError, match="max_attempts"):
            queue.schedule("a", "* * * * *", report, Report(1), max_attempts=-1)
        queue.periodic("a", "* * * * *", report, Report(1))
        with pytest.raises(InvalidArgument, match="'a' is declared twice"):
            queue.periodic("a", "0 * * * *", report, Report(2))
    assert not (tmp_path / "none.db").exists()


VERBS: list[Callable[[DBQueue, Any], object]] = [
    DBQueue.unschedule,
    DBQueue.get_schedule,
    DBQueue.pause_schedule,
    DBQueue.resume_schedule,
    DBQueue.reset_schedule,
    DBQueue.run_schedule,
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_checks_its_name_first(verb: Callable[[DBQueue, Any], object], tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with closing(DBQueue(f"sqlite:///{path}")) as queue:
        for name in ("", 5, None, "a\0b"):
            with pytest.raises(InvalidName, match="schedule name"):
                verb(queue, name)
        with pytest.raises(ReservedName):
            verb(queue, "dbqueue.mine")
        if verb is not DBQueue.run_schedule:
            with pytest.raises(InvalidArgument, match="owner"):
                verb(queue, "a", 5)  # type: ignore[call-arg]
    assert not path.exists()


@pytest.mark.req("A2")
def test_a_schedule_that_is_not_there(lab: Lab) -> None:
    assert lab.queue.unschedule("none") is False
    assert lab.queue.get_schedule("none") is None
    for verb in VERBS[2:]:
        with pytest.raises(ScheduleNotFound, match=r"'none'.*dbqueue schedules list"):
            verb(lab.queue, "none")
    lab.kept("some")
    assert lab.queue.unschedule("some") is True
    assert lab.queue.unschedule("some") is False


@pytest.mark.req("A1")
def test_what_is_stored_is_returned(lab: Lab) -> None:
    queue = lab.another_queue()
    report = declared(queue)
    lab.at("2026-03-02 10:00:42")
    given = queue.schedule(
        "nightly", "0 3 * * 1-5", report, Report(7), timezone="Europe/Berlin", catch_up="latest", max_age=3600.5, key="k",
        priority=9, max_attempts=2,
    )  # fmt: skip
    assert given == lab.queue.get_schedule("nightly")
    assert lab.queue.schedules() == [given]
    assert (given.name, given.owner, given.spec, given.timezone) == ("nightly", "", "0 3 * * 1-5", "Europe/Berlin")
    assert (given.catch_up, given.max_age, given.key) == ("latest", 3600.5, "k")
    assert (given.target, given.queue, given.priority, given.max_attempts) == ("tests.report", "reports", 9, 2)
    assert (given.paused, given.retired, given.static, given.error, given.fired, given.fired_at) == (
        False, False, False, None, 0, None,
    )  # fmt: skip
    assert to_instant(given.last_slot) == to_instant(given.anchor) == instant("2026-03-02 10:00:00")  # D16: the minute
    assert given.next_slot is not None
    assert to_instant(given.next_slot) == instant("2026-03-03 02:00:00")
    every = queue.schedule("every", "@every 90s", "raw", 1)
    assert instant("2026-03-02 10:00:42") <= to_instant(every.anchor) <= instant("2026-03-02 10:00:44")
    assert to_instant(every.anchor) % 1_000_000 == 0
    plain = queue.schedule("plain", "* * * * *", report, Report(1))
    assert (plain.queue, plain.priority, plain.max_attempts) == ("reports", 4, 5)
    assert repr(plain) == "<Schedule plain * * * * *>"


@pytest.mark.req("A5")
def test_jobs_of_a_target_have_its_policy_and_run(lab: Lab) -> None:
    queue = lab.another_queue()
    seen: list[int] = []

    @queue.job(max_attempts=5, timeout=20, name="tests.report", queue="reports", priority=4, on_crash="fail")
    def report(report: Report) -> None:
        seen.append(report.number)

    queue.schedule("one", "* * * * *", report, Report(1))
    queue.schedule("two", "* * * * *", report, Report(2), priority=9, max_attempts=2)
    lab.run_until("2026-03-02 10:01:00", lab.beat())
    jobs = {job.source: job for job in queue.jobs()}
    one, two = jobs["one"], jobs["two"]
    assert (one.target, one.queue, one.priority, one.max_attempts, one.on_crash) == (
        "tests.report", "reports", 4, 5, "fail",
    )  # fmt: skip
    assert (two.priority, two.max_attempts) == (9, 2)
    assert queue.get_job(one.id) == one
    assert one.sequence == instant("2026-03-02 10:01:00")
    assert Worker(queue, WorkerOptions(once=True, queues=("reports",))).run() == 0
    assert sorted(seen) == [1, 2]
    assert queue.counts()["succeeded"] == 2


def rows(lab: Lab) -> list[Any]:
    return lab.sql("SELECT * FROM {schedules} ORDER BY name")


@pytest.mark.req("A1")
def test_the_same_declaration_again_writes_nothing(lab: Lab) -> None:
    lab.kept("some", key="k")
    lab.settle(lab.beat())
    before = rows(lab)
    lab.later(hours=3)
    lab.kept("some", key="k")
    assert rows(lab) == before
    lab.kept("some", key="other")
    after = lab.queue.get_schedule("some")
    assert after is not None
    assert (after.key, to_instant(after.last_slot)) == ("other", instant("2026-03-02 10:00:00"))


@pytest.mark.req("A1")
def test_a_declaration_mends_a_row_that_was_spoilt_by_hand(lab: Lab) -> None:
    lab.kept("some")
    lab.sql("UPDATE {schedules} SET spec = 'nonsense'")
    lab.settle(lab.beat())
    assert lab.queue.get_schedule("some").error is not None  # type: ignore[union-attr]
    lab.kept("some")
    mended = lab.queue.get_schedule("some")
    assert mended is not None
    assert (mended.spec, mended.error) == ("* * * * *", None)


def test_a_paused_schedule_stays_paused_when_it_is_declared_again(lab: Lab) -> None:
    lab.kept("some")
    lab.queue.pause_schedule("some")
    lab.kept("some", spec="0 * * * *")
    assert lab.queue.get_schedule("some").paused  # type: ignore[union-attr]


@pytest.mark.req("A5")
def test_run_now_adds_a_job_beside_the_slots(lab: Lab) -> None:
    lab.kept("some", spec="0 * * * *")
    lab.kept("keyed", spec="0 * * * *", key="k")
    first, second = lab.queue.run_schedule("some"), lab.queue.run_schedule("some")
    assert first.id != second.id
    job = lab.queue.get_job(first.id)
    assert job is not None
    assert (job.queue, job.source, job.sequence) == ("raw", "some", None)
    assert lab.queue.run_schedule("keyed").duplicate is False
    assert lab.queue.run_schedule("keyed").duplicate is True
    lab.run_until("2026-03-02 11:00:00", lab.beat())
    assert lab.slots("some") == ["2026-03-02 11:00"]
    lab.sql("UPDATE {schedules} SET queue = NULL WHERE name = 'some'")
    with pytest.raises(InvalidArgument, match="no queue"):
        lab.queue.run_schedule("some")


def test_declarations_are_not_written_before_they_are_started(lab: Lab) -> None:
    queue = lab.another_queue()
    queue.periodic("some", "* * * * *", "raw", 1)
    assert queue.schedules() == []
    assert queue.start_schedules() == []
    (found,) = queue.schedules()
    assert found.static is True
    before = rows(lab)
    lab.later(hours=1)
    assert queue.start_schedules() == []
    assert rows(lab) == before
    queue.pause_schedule("some")
    lab.sql("UPDATE {schedules} SET spec = '0 0 * * *'")
    assert queue.start_schedules() == []  # the row is the truth: what somebody wrote into it is no other version
