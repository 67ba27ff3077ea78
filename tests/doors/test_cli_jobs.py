"""`dbqueue jobs` and `dbqueue queues`: what is printed, and what is done, for jobs in every state on both databases."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

from dbqueue import DBQueue
from dbqueue.cli import jobs as jobs_command
from dbqueue.cli.output import WIDTH, iso
from dbqueue.states import State, allowed
from tests.doors.conftest import Run
from tests.factory import make

STATES = [state.label for state in State]
NOBODY = uuid.UUID("0198a000-0000-7000-8000-000000000000")
TIMES = {"run_at", "created_at", "started_at", "ready_at", "lease_until", "updated_at", "finished_at"}
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def state_of(queue: DBQueue, job_id: UUID) -> str:
    record = queue.get_job(job_id)
    assert record is not None
    return record.state


# -- looking -----------------------------------------------------------------------------------------------------------


def test_list_as_json_has_every_field_of_every_job(cli: Run, database_url: str, jobs: dict[str, UUID]) -> None:
    code, out, err = cli("jobs", "list", "--url", database_url, "--json")
    assert (code, err) == (0, "")
    listed = {job["state"]: job for job in json.loads(out)["jobs"]}
    assert {state: job["id"] for state, job in listed.items()} == {state: str(job_id) for state, job_id in jobs.items()}
    for job in listed.values():
        assert "payload" not in job
        assert all(job[name] is None or ISO.fullmatch(job[name]) for name in TIMES)
        assert {name: type(job[name]) for name in ("priority", "attempt", "max_attempts")} == {
            "priority": int, "attempt": int, "max_attempts": int,
        }  # fmt: skip
    assert listed["dead"]["error_kind"] == "failed"
    assert listed["dead"]["error_summary"] == "ValueError"
    assert listed["running"]["lease_until"] is not None


@pytest.mark.parametrize("option", ["--state", "--queue", "--target", "--key"])
def test_list_filters(cli: Run, database_url: str, jobs: dict[str, UUID], option: str) -> None:
    value = {"--target": "shop.jobs.dead", "--key": "k:dead"}.get(option, "dead")
    listed = cli("jobs", "list", "--url", database_url, "--json", option, value).json["jobs"]
    assert [job["id"] for job in listed] == [str(jobs["dead"])]


def test_list_as_a_table(cli: Run, database_url: str, jobs: dict[str, UUID], queue: DBQueue) -> None:
    code, out, err = cli("jobs", "list", "--url", database_url)
    header, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert header.split() == ["ID", "STATE", "TRIES", "CHANGED", "QUEUE", "TARGET"]
    assert {tuple(line.split()[:2]) for line in lines} == {(str(job_id), state) for state, job_id in jobs.items()}
    assert {line.split()[2] for line in lines} == {"0/3", "1/3"}
    code, out, err = cli("jobs", "list", "--url", database_url, "--limit", 2)
    assert (len(out.splitlines()), err) == (3, "The first 2; --limit shows more.\n")
    queue.purge(["dead"])
    assert cli("jobs", "list", "--url", database_url, "--state", "dead") == (0, "", "No such jobs.\n")
    assert cli("jobs", "list", "--url", database_url, "--state", "dead", "--json").json == {"jobs": []}


def test_tables_fit_and_nothing_in_a_row_commands_the_terminal(cli: Run, database_url: str, queue: DBQueue) -> None:
    long_name = "a long name " * 16 + "end"
    queue.send(long_name, {}, key="k")
    job_id = queue.send("mail", {"text": "\x1b[2J"}, key="\x1b[31mred\r").id
    for command in (["jobs", "list"], ["queues"]):
        out = cli(*command, "--url", database_url).out
        assert max(map(len, out.splitlines())) <= WIDTH
        assert "end" in out
        assert len({line.rindex("  ") for line in out.splitlines()}) > 0
    shown = cli("jobs", "show", job_id, "--payload", "--url", database_url).out
    assert "\x1b" not in shown
    assert "\\x1b[31mred\\r" in shown


def test_show(cli: Run, database_url: str, jobs: dict[str, UUID], queue: DBQueue) -> None:
    for state, job_id in jobs.items():
        record = queue.get_job(job_id)
        assert record is not None
        code, out, err = cli("jobs", "show", job_id, "--url", database_url)
        assert (code, err) == (0, "")
        shown = dict(line.split(maxsplit=1) for line in out.splitlines())
        assert shown["state"] == state
        assert shown["timeout"] == "30.0 s"
        assert shown["updated_at"] == iso(record.updated_at)
        assert "payload" not in shown
        shown = cli("jobs", "show", job_id, "--url", database_url, "--json").json
        assert (shown["id"], shown["state"], shown["timeout"]) == (str(job_id), state, 30)
        assert "payload" not in shown


@pytest.mark.req("D10")
def test_a_payload_is_shown_only_when_asked_for(cli: Run, database_url: str, queue: DBQueue) -> None:
    job_id = queue.send("mail", {"to": "müller", "lines": [1, 2.5, None]}).id
    for form in ([], ["--json"]):
        assert "müller" not in cli("jobs", "show", job_id, "--url", database_url, *form).out
    show = ("jobs", "show", job_id, "--payload", "--url", database_url)
    assert cli(*show).out.endswith('payload\n{\n  "to": "müller",\n  "lines": [\n    1,\n    2.5,\n    null\n  ]\n}\n')
    assert cli(*show, "--json").json["payload"] == {"to": "müller", "lines": [1, 2.5, None]}


@pytest.mark.parametrize("payload", [b"\x80\x02K*." * 20, b'{"a": NaN}', b"[" * 100_000, b"[" + b"1" * 5_000 + b"]"])
def test_a_payload_that_is_no_json_is_shown_in_hex(cli: Run, database_url: str, queue: DBQueue, payload: bytes) -> None:
    job_id = queue.send("mail", {}).id
    database = queue.database
    with database.transaction() as session:
        text = database.dialect.names.fill("UPDATE {jobs} SET payload = ")
        session.execute(text + (":p" if database.dialect.name == "sqlite" else "%(p)s"), {"p": payload})
    show = ("jobs", "show", job_id, "--payload", "--url", database_url)
    words, *lines = cli(*show).out.split("payload ")[1].splitlines()
    assert "no JSON" in words
    assert bytes.fromhex("".join(lines)) == payload
    shown = cli(*show, "--json").json
    assert "payload" not in shown
    assert bytes.fromhex(shown["payload_hex"]) == payload


def test_the_payload_of_a_job_that_succeeded_is_not_kept(cli: Run, database_url: str, jobs: dict[str, UUID]) -> None:
    show = ("jobs", "show", jobs["succeeded"], "--payload", "--url", database_url)
    assert cli(*show).out.endswith("payload        (not kept)\n")
    assert cli(*show, "--json").json["payload"] is None


def test_queues(cli: Run, database_url: str, queue: DBQueue, jobs: dict[str, UUID]) -> None:
    queue.send("pending", {}, delay=600)
    code, out, err = cli("queues", "--url", database_url)
    assert (code, err) == (0, "")
    header, *lines = [line.split() for line in out.splitlines()]
    assert header == ["QUEUE", "READY", "WAITING", "RUNNING", "BLOCKED", "UNKNOWN", "OLDEST"]
    cells = {line[0]: line[1:] for line in lines}
    assert cells.keys() == {"pending", "running", "blocked", "unknown"}
    assert cells["pending"][:5] == ["1", "1", "0", "0", "0"]
    assert cells["pending"][5] == "60m"
    assert cells["blocked"] == ["0", "0", "0", "1", "0", "-"]
    found = {depth.pop("queue"): depth for depth in cli("queues", "--url", database_url, "--json").json["queues"]}
    assert found["unknown"] == {"ready": 0, "waiting": 0, "running": 0, "blocked": 0, "unknown": 1, "oldest_age": None}
    assert isinstance(found["pending"]["oldest_age"], float)


def test_no_queues(cli: Run, database_url: str, queue: DBQueue) -> None:
    assert cli("queues", "--url", database_url) == (0, "", "No unfinished jobs.\n")
    assert cli("queues", "--url", database_url, "--json").json == {"queues": []}


# -- deciding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "after"), [("retry", "pending"), ("cancel", "cancelled")])
def test_each_id_is_tried_and_told(
    cli: Run, database_url: str, queue: DBQueue, jobs: dict[str, UUID], verb: str, after: str
) -> None:
    """All states and an unknown id in one command: those that the MOVES allow are moved, the others are refused."""
    records = {state: queue.get_job(job_id, with_payload=True) for state, job_id in jobs.items()}
    code, out, err = cli("jobs", verb, *jobs.values(), NOBODY, "--url", database_url, "--json")
    assert code == 1
    results = {result["id"]: result for result in json.loads(out)["results"]}
    refused = {result["id"]: result["error"] for result in results.values() if "error" in result}
    assert refused.pop(str(NOBODY)) == "job_not_found"
    for state, job_id in jobs.items():
        record = records[state]
        assert record is not None
        moves = allowed(verb, State[state.upper()]) and record.payload is not None  # else there is nothing to run again
        assert state_of(queue, job_id) == (after if moves else state)
        if moves:
            assert results[str(job_id)] == {"id": str(job_id), "state": after, "was": state}
        else:
            assert refused.pop(str(job_id)) == "illegal_move"
    assert not refused
    errors = [json.loads(line) for line in err.splitlines()]
    assert [(e["error"], e["message"]) for e in errors] == [
        (r["error"], r["message"]) for r in results.values() if "error" in r
    ]


def test_verbs_in_words(cli: Run, database_url: str, jobs: dict[str, UUID]) -> None:
    code, out, err = cli("jobs", "retry", jobs["dead"], jobs["running"], "--url", database_url)
    assert (code, out) == (1, f"{jobs['dead']} is pending (was dead)\n")
    assert err.startswith(f"Error: job {jobs['running']} is running")
    assert err.endswith("[illegal_move]\n")
    assert cli("jobs", "cancel", jobs["running"], "--url", database_url) == (
        0, f"{jobs['running']} is cancelled (was running)\n", "",
    )  # fmt: skip


def test_a_key_that_is_taken_refuses_a_retry(
    cli: Run, database_url: str, queue: DBQueue, jobs: dict[str, UUID]
) -> None:
    make(queue.database, target="shop.jobs.dead", key="k:dead")
    code, _, err = cli("jobs", "retry", jobs["dead"], "--url", database_url)
    assert code == 1
    assert "[key_taken]" in err


def test_what_was_done_is_told_when_the_database_goes_away_in_the_middle(
    cli: Run, database_url: str, jobs: dict[str, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbqueue.errors import ConnectionLost

    real = DBQueue.retry

    def retry(queue: DBQueue, job_id: UUID) -> str:
        if job_id == jobs["cancelled"]:
            raise ConnectionLost("gone")
        return real(queue, job_id)

    monkeypatch.setattr(DBQueue, "retry", retry)
    answer = cli("jobs", "retry", jobs["dead"], jobs["cancelled"], jobs["acked"], "--url", database_url, "--json")
    assert answer.code == 3
    assert answer.json == {"results": [{"id": str(jobs["dead"]), "state": "pending", "was": "dead"}]}
    assert answer.error["error"] == "connection_lost"


@pytest.mark.parametrize("outcome", ["succeeded", "discarded"])
def test_resolve_asks_after_showing(
    cli: Run, database_url: str, queue: DBQueue, jobs: dict[str, UUID], outcome: str
) -> None:
    resolve = ("jobs", "resolve", jobs["unknown"], outcome, "--url", database_url)
    code, out, err = cli(*resolve, stdin="n\n")
    assert (code, out) == (1, "")
    assert f"id             {jobs['unknown']}\n" in err
    assert f"Resolve this job as {outcome}? [y/N]: Nothing was changed." in err
    code, out, err = cli(*resolve)  # nobody answers
    assert (code, out) == (2, "")
    assert "--yes" in err
    assert state_of(queue, jobs["unknown"]) == "unknown"
    code, out, err = cli(*resolve, stdin="y\n")
    assert (code, out) == (0, f"{jobs['unknown']} is {outcome} (was unknown)\n")
    assert state_of(queue, jobs["unknown"]) == outcome
    assert cli(*resolve, "--yes").code == 1


def test_resolve_with_the_time_that_was_read(
    cli: Run, database_url: str, queue: DBQueue, jobs: dict[str, UUID]
) -> None:
    resolve = (
        "jobs",
        "resolve",
        jobs["unknown"],
        "discarded",
        "--url",
        database_url,
        "--json",
        "--expected-updated-at",
    )
    record = queue.get_job(jobs["unknown"])
    assert record is not None
    stale = cli(*resolve, iso(record.updated_at - timedelta(microseconds=1)))
    assert (stale.code, stale.error["error"]) == (1, "stale_update")
    assert state_of(queue, jobs["unknown"]) == "unknown"
    read = cli("jobs", "show", jobs["unknown"], "--url", database_url, "--json").json["updated_at"]
    assert cli(*resolve, read).json["results"] == [{"id": str(jobs["unknown"]), "state": "discarded", "was": "unknown"}]


@pytest.mark.parametrize("state", [state for state in STATES if state != "unknown"])
@pytest.mark.databases("sqlite")
def test_only_an_unknown_job_is_resolved(
    cli: Run, database_url: str, queue: DBQueue, jobs: dict[str, UUID], state: str
) -> None:
    code, out, err = cli("jobs", "resolve", jobs[state], "succeeded", "--url", database_url)
    assert (code, out) == (1, "")
    assert err.startswith(f"Error: job {jobs[state]} is {state}")
    assert state_of(queue, jobs[state]) == state


def test_purge(
    cli: Run, database_url: str, queue: DBQueue, jobs: dict[str, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    purge = ("jobs", "purge", "--state", "dead", "--state", "acked", "--url", database_url)
    code, out, err = cli(*purge, "--older-than", "0s", stdin="\n")
    assert (code, out) == (1, "")
    assert err.startswith("There are 1 dead and 1 acked jobs; delete those older than 0 s? [y/N]: ")
    assert cli(*purge, "--older-than", "7d", "--yes") == (0, "deleted 0\n", "")
    monkeypatch.setattr(jobs_command, "BATCH", 1)
    monkeypatch.setattr(jobs_command, "PROGRESS_EVERY_S", 0)
    assert cli(*purge, "--older-than", "0s", "--yes") == (0, "deleted 2\n", "1 deleted so far\n2 deleted so far\n")
    assert set(queue.counts()) == set(STATES) - {"dead", "acked"}
    assert cli(*purge, "--older-than", "0s", "--yes", "--json").json == {"deleted": 0}


def test_an_interrupted_purge_tells_what_it_deleted(
    cli: Run, database_url: str, jobs: dict[str, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    def purge(*_: object) -> Iterator[int]:
        yield 1_000
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs_command, "_batches", purge)
    answer = cli("jobs", "purge", "--state", "dead", "--older-than", "0s", "--yes", "--url", database_url, "--json")
    assert answer.code == 130
    assert answer.json == {"deleted": 1_000}


@pytest.mark.parametrize(
    "words",
    [
        ["list", "--state", "done"],
        ["list", "--limit", "0"],
        ["show", "0198"],
        ["retry"],
        ["resolve", NOBODY, "dead"],
        ["resolve", NOBODY, "discarded", "--expected-updated-at", "yesterday"],
        ["resolve", NOBODY, "discarded", "--expected-updated-at", "2026-01-01T00:00:00"],
        ["purge", "--state", "pending", "--older-than", "7d"],
        ["purge", "--state", "dead"],
        ["purge", "--state", "dead", "--older-than", "7"],
        ["purge", "--state", "dead", "--older-than", "-1d"],
        ["purge", "--state", "dead", "--older-than", "4000d"],
        ["--nonsense"],
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_wrong_usage_is_told_in_one_line_before_any_database_is_opened(
    cli: Run, words: list[object], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/none.db"
    code, out, err = cli("jobs", *words, "--url", url)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"Error: .* \(see dbqueue jobs[a-z ]* --help\) \[invalid_argument\]\n", err)
    answer = cli("jobs", *words, "--url", url, "--json")
    assert answer.error["error"] == "invalid_argument"
    assert not list(tmp_path.iterdir())
