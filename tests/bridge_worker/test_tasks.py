"""What a task sees, and how it ends, is as in Celery's own worker; all of these run on one `dbqueue worker -A proj`."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.exceptions import (
    ChordError,
    Reject,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)

from tests.bridge_worker.projects import NAME, Project
from tests.waiting import wait_for

pytestmark = pytest.mark.req("C6")


def fresh() -> str:
    return uuid4().hex[:8]


# -- what it sees ------------------------------------------------------------------------------------------------------


def test_a_request(project: Project) -> None:
    sent = project.send("see", 1, headers={"x": "y"}, priority=4)
    seen = sent.get(timeout=30)
    assert (seen["id"], seen["root_id"], seen["parent_id"]) == (sent.id, sent.id, None)
    assert seen["args"] == [1]
    assert seen["hostname"] == NAME
    assert (seen["retries"], seen["group"], seen["called_directly"], seen["is_eager"]) == (0, None, False, False)
    assert seen["delivery_info"] == {"exchange": "", "routing_key": "proj", "priority": 4, "redelivered": False}
    assert seen["timelimit"] == [None, None]
    assert seen["headers"] == {"x": "y"}
    assert seen["correlation_id"] == sent.id
    limited = project.value("see", time_limit=9, soft_time_limit=8)
    assert limited["timelimit"] == [9, 8]


def test_a_chain_has_a_root_and_parents(project: Project) -> None:
    result = chain(project.s("add", 1, 2), project.s("add", 3), project.s("see")).delay()
    seen = result.get(timeout=30)
    assert seen["args"] == [6]
    assert seen["parent_id"] == result.parent.id
    assert seen["root_id"] == result.parent.parent.id


def test_stamps(project: Project) -> None:
    signature = chain(project.s("add", 1, 2), project.s("see"))
    signature.stamp(tenant="acme", append_stamps=False)
    seen = signature.delay().get(timeout=30)
    assert seen["stamps"]["tenant"] in ("acme", ["acme"])
    assert seen["stamped_headers"] == ["tenant"]


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_a_success(project: Project) -> None:
    sent = project.send("add", 2, 3)
    assert sent.get(timeout=30) == 5
    (row,) = project.ended(sent.id)
    assert (row.state, row.attempt, row.target) == ("succeeded", 1, "dbqueue.message.proj.add")


def test_a_failure_is_dead_and_can_be_retried(project: Project) -> None:
    name = fresh()
    sent = project.send("fail", name)
    with pytest.raises(ValueError, match=name):
        sent.get(timeout=30)
    (row,) = project.ended(sent.id)
    assert (row.state, row.error_kind, row.error_summary) == ("dead", "failed", "ValueError")
    project.queue.retry(row.id)
    wait_for(lambda: project.notes.count(f"signal task_failure proj.fail {sent.id}") == 2, 30)
    assert [job.state for job in project.ended(sent.id)] == ["dead"]


def test_a_retry(project: Project) -> None:
    name = fresh()
    sent = project.send("again", name, 2)
    assert sent.get(timeout=30) == f"{name} after 2 in proj"
    assert [note for note in project.notes if name in note] == [f"try {name} {n}" for n in range(3)]
    assert [row.state for row in project.ended(sent.id, 3)] == ["acked", "acked", "succeeded"]
    assert project.notes.count(f"signal task_retry proj.again {sent.id}") == 2


@pytest.mark.parametrize(
    ("options", "queue"),
    [({"countdown": 0.3}, "proj"), ({"queue": "side"}, "side")],
    ids=["countdown", "other queue"],
)
def test_a_retry_with_options(project: Project, options: dict[str, object], queue: str) -> None:
    name = fresh()
    assert project.value("again", name, 1, options) == f"{name} after 1 in {queue}"


def test_more_retries_than_allowed(project: Project) -> None:
    sent = project.send("again", fresh(), 9)
    with pytest.raises(Exception, match="Can't retry") as told:
        sent.get(timeout=30)
    assert type(told.value).__name__ == "MaxRetriesExceededError"
    assert [row.state for row in project.ended(sent.id, 4)] == ["acked"] * 3 + ["dead"]


def test_other_ways_to_retry(project: Project) -> None:
    assert project.value("without_end", 5) == 5
    assert project.value("auto", 2) == 2
    with pytest.raises(KeyError):
        project.value("auto", 3)
    name = fresh()
    sent = project.send("goes_on", name)
    project.wait_for_note(f"went on {name}")
    wait_for(lambda: [row.state for row in project.rows(sent.id)] == ["succeeded"] * 2, 30)
    assert sent.get(timeout=30) in ("0", "1")  # whichever wrote last


def test_replace(project: Project) -> None:
    assert project.value("replaced", 5) == 105
    assert chord([project.s("replaced", n) for n in range(3)], project.s("total")).delay().get(timeout=30) == 303


def test_ignore(project: Project) -> None:
    name = fresh()
    sent = project.send("ignored", name)
    (row,) = project.ended(sent.id)
    assert (row.state, sent.state) == ("acked", "PENDING")
    assert f"ignored {name}" in project.notes


def test_reject(project: Project) -> None:
    name = fresh()
    sent = project.send("rejected", name, False)
    with pytest.raises(Reject):
        sent.get(timeout=30)
    (row,) = project.ended(sent.id)
    assert (row.state, row.error_kind) == ("dead", "rejected")
    sent = project.send("rejected", name, True)
    assert sent.get(timeout=30) == "in the end"
    (row,) = project.ended(sent.id)
    assert (row.state, row.attempt) == ("succeeded", 2)


def test_a_result_that_nobody_wants(project: Project) -> None:
    name = fresh()
    for sent in (project.send("unkept", name), project.send("add", 1, 2, ignore_result=True)):
        (row,) = project.ended(sent.id)
        assert (row.state, sent.state) == ("succeeded", "PENDING")
    assert chain(project.s("unkept", name), project.s("add", "!")).delay().get(timeout=30) == name + "!"


def test_what_a_body_sends_goes_out_though_it_fails(project: Project) -> None:
    name = fresh()
    with pytest.raises(ValueError, match=name):
        project.value("sends_and_fails", name)
    project.wait_for_note(f"told from the body of {name}")


def test_a_task_class_of_its_own(project: Project) -> None:
    name = fresh()
    assert project.value("own", name, False) == f"own {name}"
    project.wait_for_note(f"after {name} SUCCESS")
    mine = [note for note in project.notes if name in note and not note.startswith("told")]
    assert mine == [f"before {name}", f"success {name} own {name}", f"after {name} SUCCESS"]
    project.wait_for_note(f"told from __call__ of {name}")
    name = fresh()
    with pytest.raises(ValueError, match=name):
        project.value("own", name, True)
    assert f"failure {name} ValueError" in project.notes
    name = fresh()
    with pytest.raises(TimeLimitExceeded):
        project.value("own_hard", name)
    assert [note for note in project.notes if name in note and "told" not in note] == [
        f"before {name}", f"failure {name} TimeLimitExceeded", f"after {name} FAILURE",
    ]  # fmt: skip


def test_signals(project: Project) -> None:
    sent = project.send("add", 1, 1)
    sent.get(timeout=30)
    project.ended(sent.id)
    mine = [note.removesuffix(f" proj.add {sent.id}") for note in project.notes if sent.id in note]
    assert sorted(mine) == ["signal task_postrun", "signal task_prerun"]
    assert "signal task_success proj.add" in project.notes
    for name in ("worker_init", "worker_ready", "worker_process_init"):
        assert any(note.startswith(f"signal {name}") for note in project.notes), name


# -- canvas ------------------------------------------------------------------------------------------------------------


def test_links(project: Project) -> None:
    name = fresh()
    project.s("add", 1, 2).apply_async(link=project.s("tell", name))
    project.wait_for_note(f"told 3 {name}")
    with pytest.raises(ValueError, match=name):
        project.s("fail", name).apply_async(link_error=project.s("told_of_error", name)).get(timeout=30)
    project.wait_for_note(f"error of {name}: ValueError")
    with pytest.raises(ValueError, match=name):
        project.s("fail", name).apply_async(link_error=project.s("errback", name)).get(timeout=30)
    project.wait_for_note(f"old error of {name}")


def test_canvases(project: Project) -> None:
    s = project.s
    assert chain(s("add", 1, 1), *[s("add", 1) for _ in range(10)]).delay().get(timeout=30) == 12
    assert group(s("add", n, n) for n in range(5)).delay().get(timeout=30) == [0, 2, 4, 6, 8]
    assert chord((s("add", n, n) for n in range(10)), s("total")).delay().get(timeout=30) == 90
    parts = [s("add", n, n) for n in range(3)]
    body = chord(parts, s("see")).delay()
    assert body.get(timeout=30)["parent_id"] in [part.id for part in body.parent.results]
    nested = chain(s("add", 1, 1), group(s("add", 1), s("add", 2)), s("total"), group(s("add", 1), s("add", 2)))
    assert nested.delay().get(timeout=30) == [8, 9]


def test_a_chord_whose_part_fails(project: Project) -> None:
    name = fresh()
    failing = chord([project.s("add", 1, 1), project.s("fail", name)], project.s("total"))
    body = failing.apply_async(link_error=project.s("told_of_error", name))
    with pytest.raises(ChordError):
        project.result(body.id).get(timeout=30)
    project.wait_for_note(f"error of {name}: ChordError")


# -- limits and crashes ------------------------------------------------------------------------------------------------


def test_a_soft_limit(project: Project) -> None:
    assert project.value("soft", True) == "caught"
    sent = project.send("soft", False)
    with pytest.raises(SoftTimeLimitExceeded):
        sent.get(timeout=30)
    assert project.ended(sent.id)[0].error_summary == "SoftTimeLimitExceeded"
    with pytest.raises(SoftTimeLimitExceeded):
        project.value("slow", fresh(), 30, soft_time_limit=0.1)


def test_a_hard_limit(project: Project) -> None:
    name = fresh()
    sent = project.s("hard", name).apply_async(link_error=project.s("told_of_error", name))
    with pytest.raises(TimeLimitExceeded):
        sent.get(timeout=30)
    (row,) = project.ended(sent.id)
    assert (row.state, row.error_kind, row.attempt) == ("dead", "timeout", 1)
    project.wait_for_note(f"error of {name}: TimeLimitExceeded")
    assert f"signal task_failure proj.hard {sent.id}" in project.notes
    in_chord = chord([project.s("hard", name), project.s("add", 1, 1)], project.s("total")).delay()
    with pytest.raises(ChordError):
        project.result(in_chord.id).get(timeout=30)


def test_a_crash_costs_an_attempt_and_three_are_the_end(project: Project) -> None:
    name = fresh()
    lives, ends = project.send("dies", name, 2), project.s("dies", "for ever", 9)
    failed = ends.apply_async(link_error=project.s("told_of_error", name))
    assert lives.get(timeout=30) == "lived"
    (row,) = project.ended(lives.id)
    assert (row.state, row.attempt, row.lapses) == ("succeeded", 3, 2)
    with pytest.raises(WorkerLostError):
        failed.get(timeout=30)
    (row,) = project.ended(failed.id)
    assert (row.state, row.error_kind, row.attempt) == ("dead", "crashed", 3)
    project.wait_for_note(f"error of {name}: WorkerLostError")
    sent = project.send("exits")
    with pytest.raises(WorkerLostError):
        sent.get(timeout=30)


def test_what_puts_itself_back_has_not_crashed(project: Project) -> None:
    lives, ends = project.send("puts_back_and_dies", fresh(), 2, 2), project.send("puts_back_and_dies", fresh(), 2, 9)
    assert lives.get(timeout=30) == "lived"
    (row,) = project.ended(lives.id)
    assert (row.state, row.attempt, row.lapses) == ("succeeded", 5, 2)
    with pytest.raises(WorkerLostError):
        ends.get(timeout=30)
    (row,) = project.ended(ends.id)
    assert (row.state, row.error_kind, row.attempt) == ("dead", "crashed", 5)


def test_a_limit_that_is_no_number_harms_nobody(project: Project) -> None:
    """The header comes from anybody; the worker counts with it."""
    assert project.value("add", 1, 1, time_limit="30") == 2
    assert project.value("add", 2, 2) == 4


# -- time --------------------------------------------------------------------------------------------------------------


def test_eta_and_countdown_are_exact(project: Project) -> None:
    due = time.time() + 0.4
    eta = project.send("at", "eta", eta=datetime.fromtimestamp(due, timezone.utc))
    naive = project.send("at", "naive", eta=datetime.fromtimestamp(due, timezone.utc).replace(tzinfo=None))
    far = project.send("at", "far", eta=datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(hours=2))
    for sent in (eta, naive):
        assert due <= sent.get(timeout=30) < due + 2
    # One without a zone is looked at by a worker first, which gives it back.
    wait_for(lambda: [(row.state, row.attempt) for row in project.rows(far.id)] == [("pending", 0)], 10)
    project.queue.cancel(project.rows(far.id)[0].id)


def test_expiry(project: Project) -> None:
    sent = project.send("add", 1, 1, expires=datetime.now(timezone.utc) - timedelta(seconds=1))
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=30)
    (row,) = project.ended(sent.id)
    assert (row.state, row.error_kind) == ("cancelled", "expired")
    project.wait_for_note(f"signal task_revoked proj.add {sent.id}")
    assert f"signal task_prerun proj.add {sent.id}" not in project.notes


def test_a_message_that_outlived_its_own_time(project: Project) -> None:
    """RabbitMQ's kind of expiry: such a message is never delivered, and nothing is told."""
    sent = project.send("add", 1, 1, expiration=0.001, countdown=0.2)
    (row,) = project.ended(sent.id)
    assert (row.state, row.error_kind) == ("cancelled", "expired")
    assert sent.state == "PENDING"


def test_revoked_while_it_waits(project: Project) -> None:
    sent = project.send("add", 1, 1, countdown=3_600)
    project.app.control.revoke(sent.id)
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=30)
    (row,) = project.ended(sent.id)
    assert (row.state, row.error_kind) == ("cancelled", "revoked")
    project.wait_for_note(f"signal task_revoked proj.add {sent.id}")


def test_revoked_before_it_is_sent(project: Project) -> None:
    task_id, name = str(uuid4()), fresh()
    project.app.control.revoke(task_id)
    part = project.s("tell", name).set(task_id=task_id)
    body = chord([part, project.s("add", 1, 1)], project.s("total")).delay()
    with pytest.raises(TaskRevokedError):
        project.result(task_id).get(timeout=30)
    with pytest.raises(ChordError):
        project.result(body.id).get(timeout=30)
    (row,) = project.ended(task_id)
    assert (row.state, row.error_kind) == ("cancelled", "revoked")
    assert f"told {name}" not in project.notes


def test_revoked_by_a_stamp(project: Project) -> None:
    name = fresh()
    project.app.control.revoke_by_stamped_headers({"run": name})
    signature = project.s("tell", name)
    signature.stamp(run=name)
    with pytest.raises(TaskRevokedError):
        signature.delay().get(timeout=30)
    assert f"told {name}" not in project.notes
