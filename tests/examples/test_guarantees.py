"""The table "What a failure costs" of docs/from-celery.md: what is seen in each cell of its first three columns, by row and column. The
fourth column is proved where our own worker is tested."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain
from celery.result import AsyncResult

from dbqueue import DBQueue
from dbqueue.views import JobRecord
from tests.examples.commands import ROOT, Commands
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C1", "C4"), pytest.mark.timeout(240)]

COLUMNS: dict[str, dict[str, bool]] = {
    "early ack (Celery's default)": {},
    "`acks_late`": {"task_acks_late": True},
    "`acks_late` + `reject_on_worker_lost`": {"task_acks_late": True, "task_reject_on_worker_lost": True},
}
EARLY, LATE, REJECTING = COLUMNS
QUEUES = {EARLY: "early", LATE: "late", REJECTING: "rejecting"}
OURS = "`dbqueue worker -A proj`"
TASKS = "tests.examples.columns"

Seen = dict[str, Any]
"""By column."""


def all_three(seen: Any) -> Seen:
    return dict.fromkeys(COLUMNS, seen)


WORKER, CHILD, BETWEEN, LEASE, LIMIT, RAISES, UNKNOWN, REFUSED, ETA = (
    "the whole worker is killed, task running",
    "its pool child is killed",
    "killed between the body's end and the ack",
    "the lease is lost while it runs (a machine that stood still)",
    "hard time limit",
    "the task raises",
    "unknown task",
    "a body that `accept_content` refuses",
    "ETA, countdown",
)

CASES: dict[str, Seen] = {
    # how often it began, how often its lease was lost, the row, the result
    WORKER: {
        EARLY: (1, 0, "acked", "PENDING"),
        LATE: (2, 1, "acked", "SUCCESS"),
        REJECTING: (2, 1, "acked", "SUCCESS"),
    },
    # how often it began, the row, the result
    CHILD: {
        EARLY: (1, "acked", "WorkerLostError"),
        LATE: (1, "acked", "WorkerLostError"),
        REJECTING: (4, "acked", "SUCCESS"),
    },
    # killed before the result is stored, and after that: how often it began, how often the next of its chain did, the result
    BETWEEN: {
        EARLY: [(1, 0, "PENDING"), (1, 1, "SUCCESS")],
        LATE: [(2, 1, "SUCCESS"), (2, 2, "SUCCESS")],
        REJECTING: [(2, 1, "SUCCESS"), (2, 2, "SUCCESS")],
    },
    # how often it began, and ended, how often the next of its chain began
    LEASE: {LATE: (2, 2, 2), REJECTING: (2, 2, 2)},
    LIMIT: all_three((1, "acked", "TimeLimitExceeded")),
    RAISES: all_three((1, "acked", "ValueError")),
    # the row, and whether the log has a line
    UNKNOWN: all_three(("dead", True)),
    REFUSED: all_three(("dead", True)),
    # in the worker's hands and in its list of scheduled tasks, not begun
    ETA: all_three((0, "running", True)),
}

OF_OUR_WORKER = {
    WORKER: "test_kills.py::test_a_killed_worker_and_a_killed_child",
    CHILD: "test_tasks.py::test_a_crash_costs_an_attempt_and_three_are_the_end",
    BETWEEN: "test_kills.py::test_killed_at_every_word_of_what_ends_a_retry",
    LEASE: "test_workers.py::test_a_lost_lease_publishes_and_stores_nothing",
    LIMIT: "test_tasks.py::test_a_hard_limit",
    RAISES: "test_tasks.py::test_a_failure_is_dead_and_can_be_retried",
    UNKNOWN: "test_workers.py::test_what_cannot_run_is_blocked_and_runs_after_a_deploy",
    REFUSED: "test_workers.py::test_what_cannot_run_is_blocked_and_runs_after_a_deploy",
    ETA: "test_tasks.py::test_eta_and_countdown_are_exact",
}


class Columns:
    """A database, and real workers with the settings of each column, which work on a queue of that column."""

    def __init__(self, commands: Commands, url: str) -> None:
        self.commands, self.url = commands, f"dbqueue+{url}"
        self.notes_file = commands.folder / "notes"
        self.notes_file.touch()
        self.queue = DBQueue(url)
        self.queue.migrate()
        self.app = Celery("columns", broker=self.url, backend=self.url, set_as_current=False)

    def worker(self, *columns: str, name: str = "w", pool: str = "prefork") -> dict[str, subprocess.Popen[bytes]]:
        """One with the settings of each column, once all of them work. Their leases end after a second."""
        started = {}
        for column in columns:
            queue = QUEUES[column]
            common = {
                "broker_transport_options": {"lease": 1},
                "worker_prefetch_multiplier": 1,
                "task_default_queue": queue,
            }
            told = {"url": self.url, "notes": str(self.notes_file), "settings": {**common, **COLUMNS[column]}}
            command = (
                f"celery -A {TASKS} worker -c 1 -P {pool} -n {name}@{queue} -l INFO --without-mingle --without-gossip"
            )
            started[column] = self.commands.start(command, COLUMN=json.dumps(told))
        for process in started.values():
            self.commands.wait_for_it(process)
        return started

    def s(self, column: str, task: str, *args: Any) -> Any:
        return self.app.signature(f"{TASKS}.{task}", args=args, queue=QUEUES[column], immutable=True)

    def send(self, column: str, task: str, *args: Any, **options: Any) -> AsyncResult:
        return self.s(column, task, *args).apply_async(**options)

    def began(self, name: str) -> list[str]:
        return [line for line in self.notes if re.match(rf"start {name}\b", line)]

    @property
    def notes(self) -> list[str]:
        return self.notes_file.read_text().splitlines()

    def row(self, column: str, task_id: str) -> JobRecord:
        """Once it has ended."""

        def ended() -> JobRecord | None:
            (found,) = [job for job in self.queue.jobs(queue=QUEUES[column], limit=1000) if job.task_id == task_id]
            return found if found.state not in ("pending", "running") else None

        found = wait_for(ended, 60, f"the row of a task in {column} did not end")
        assert found is not None
        return found

    def idle(self) -> None:
        wait_for(lambda: {"pending", "running"}.isdisjoint(self.queue.counts()), 60, "something waits")

    def result(self, sent: AsyncResult) -> str:
        """Its state; of a failure the exception's name."""
        found = AsyncResult(sent.id, app=self.app)
        return type(found.result).__name__ if found.state == "FAILURE" else str(found.state)

    def close(self) -> None:
        self.commands.close()
        self.app.close()
        self.queue.close()


@pytest.fixture
def columns(make_commands: Callable[..., Commands], database_url: str) -> Iterator[Columns]:
    made = Columns(make_commands(), database_url)
    yield made
    made.close()


# -- rows that leave the worker alive -----------------------------------------------------------------------------------


def test_one_worker_of_each_kind(columns: Columns) -> None:
    workers = columns.worker(*COLUMNS)
    seen = {row: see(columns, workers) for row, see in SEEN_ALIVE.items()}
    assert seen == {row: CASES[row] for row in SEEN_ALIVE}


def of_a_task(columns: Columns, task: str) -> Seen:
    return ends(columns, task, {column: columns.send(column, task, f"{task}-{QUEUES[column]}") for column in COLUMNS})


def ends(columns: Columns, task: str, sent: dict[str, Any]) -> Seen:
    ended = {column: columns.row(column, result.id) for column, result in sent.items()}
    for column, result in sent.items():
        wait_for(lambda: columns.result(result) != "PENDING", 60, f"{column}: {task} has no result")  # noqa: B023
    return {
        column: (len(columns.began(f"{task}-{QUEUES[column]}")), ended[column].state, columns.result(sent[column]))
        for column in COLUMNS
    }


def hard_time_limit(columns: Columns, workers: dict[str, Any]) -> Seen:
    return of_a_task(columns, "endless")


def raises(columns: Columns, workers: dict[str, Any]) -> Seen:
    return of_a_task(columns, "fails")


def unknown(columns: Columns, workers: dict[str, Any]) -> Seen:
    sent = {column: columns.send(column, "nobody_knows") for column in COLUMNS}
    return {
        column: (columns.row(column, result.id).state, "unregistered task" in columns.commands.log(workers[column]))
        for column, result in sent.items()
    }


def refused(columns: Columns, workers: dict[str, Any]) -> Seen:
    sent = {column: columns.send(column, "tell", "x", serializer="pickle") for column in COLUMNS}
    return {
        column: (
            columns.row(column, result.id).state,
            "Refusing to deserialize" in columns.commands.log(workers[column]),
        )
        for column, result in sent.items()
    }


def child_killed(columns: Columns, workers: dict[str, Any]) -> Seen:
    """Three times, where it comes back; our own worker would give up then."""
    until = columns.commands.folder / "until"
    sent = {column: columns.send(column, "held", f"held-{QUEUES[column]}", str(until)) for column in COLUMNS}
    for column in COLUMNS:
        for run in range(3 if column == REJECTING else 1):
            began = wait_for(lambda: columns.began(f"held-{QUEUES[column]}")[run:], 60, f"{column}: run {run}")  # noqa: B023
            os.kill(int(began[0].split()[2]), signal.SIGKILL)
    wait_for(lambda: len(columns.began("held-rejecting")) == 4, 60, "it did not come back")
    until.touch()
    return ends(columns, "held", sent)


def eta(columns: Columns, workers: dict[str, Any]) -> Seen:
    """Ten seconds are less than `eta_lead`."""
    sent = {column: columns.send(column, "tell", f"eta-{QUEUES[column]}", countdown=10) for column in COLUMNS}
    seen = {}
    for column, result in sent.items():

        def listed(column: str = column, task_id: str = result.id) -> bool:
            answer = columns.app.control.inspect([f"w@{QUEUES[column]}"]).scheduled() or {}
            return any(one["request"]["id"] == task_id for found in answer.values() for one in found)

        wait_for(listed, 60, f"{column}: it is not scheduled")
        (row,) = [job for job in columns.queue.jobs(queue=QUEUES[column]) if job.task_id == result.id]
        seen[column] = (len(columns.began(f"eta-{QUEUES[column]}")), row.state, True)
    return seen


SEEN_ALIVE: dict[str, Callable[[Columns, dict[str, Any]], Seen]] = {
    ETA: eta,
    RAISES: raises,
    UNKNOWN: unknown,
    REFUSED: refused,
    LIMIT: hard_time_limit,
    CHILD: child_killed,
}


# -- rows that do not ---------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_the_whole_worker_is_killed(columns: Columns) -> None:
    until = columns.commands.folder / "until"
    workers = columns.worker(*COLUMNS)
    sent = {column: columns.send(column, "held", QUEUES[column], str(until)) for column in COLUMNS}
    for column, worker in workers.items():
        wait_for(lambda: columns.began(QUEUES[column]), 60)  # noqa: B023
        if column == EARLY:
            columns.row(column, sent[column].id)
        columns.commands.kill(worker)
    until.touch()
    columns.worker(*COLUMNS, name="next")
    columns.idle()
    seen = {}
    for column, result in sent.items():
        row = columns.row(column, result.id)
        seen[column] = (len(columns.began(QUEUES[column])), row.lapses, row.state, columns.result(result))
    assert seen == CASES[WORKER]


@pytest.mark.soak
def test_killed_between_the_bodys_end_and_the_ack(columns: Columns) -> None:
    seen: Seen = {column: [] for column in COLUMNS}
    for when in ("before", "after"):
        workers, until = columns.worker(*COLUMNS, name=when), columns.commands.folder / when
        names = {column: f"{when}-{QUEUES[column]}" for column in COLUMNS}
        sent = {
            column: chain(
                columns.s(column, "killed", name, f"{when} the result", str(until)),
                columns.s(column, "tell", f"next-{name}"),
            ).delay()
            for column, name in names.items()
        }
        columns.row(EARLY, sent[EARLY].parent.id)  # an early ack is written beside the task's first moments
        until.touch()
        for worker in workers.values():
            assert worker.wait(60) == -signal.SIGKILL
        again = columns.worker(*COLUMNS, name=f"after-{when}")
        columns.idle()
        for worker in again.values():
            columns.commands.kill(worker)
        for column, name in names.items():
            first = sent[column].parent
            counts = (len(columns.began(name)), len(columns.began(f"next-{name}")), columns.result(first))
            seen[column].append(counts)
    assert seen == CASES[BETWEEN]


@pytest.mark.soak
@pytest.mark.databases("postgres")
def test_the_lease_is_lost_while_it_runs(columns: Columns) -> None:
    """The worker stands still while its task runs on, until another one has it too. (On SQLite a process that stands still keeps its
    lease: the lock that tells that it lives is the operating system's.)"""
    until = columns.commands.folder / "until"
    workers = columns.worker(*CASES[LEASE])
    for column in workers:
        chain(
            columns.s(column, "held", QUEUES[column], str(until)), columns.s(column, "tell", f"next-{QUEUES[column]}")
        ).delay()
        wait_for(lambda: columns.began(QUEUES[column]), 60)  # noqa: B023
    for worker in workers.values():
        worker.send_signal(signal.SIGSTOP)
    try:
        columns.worker(*workers, name="next")
        for column in workers:
            wait_for(lambda: len(columns.began(QUEUES[column])) == 2, 60, f"{column}: nobody took it over")  # noqa: B023
        until.touch()
        for column in workers:
            wait_for(lambda: columns.notes.count(f"end {QUEUES[column]}") == 2, 60)  # noqa: B023
    finally:
        for worker in workers.values():
            worker.send_signal(signal.SIGCONT)
    for column in workers:
        wait_for(lambda: len(columns.began(f"next-{QUEUES[column]}")) >= 2, 60, f"{column}: the next came once")  # noqa: B023
    columns.idle()
    seen = {
        column: (
            len(columns.began(QUEUES[column])),
            columns.notes.count(f"end {QUEUES[column]}"),
            len(columns.began(f"next-{QUEUES[column]}")),
        )
        for column in workers
    }
    assert seen == CASES[LEASE]


# -- the page -----------------------------------------------------------------------------------------------------------


def table() -> list[list[str]]:
    page = (ROOT / "docs" / "from-celery.md").read_text(encoding="utf-8")
    section = re.search(r"^## What a failure costs\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_cell_has_its_case() -> None:
    heads, _, *rows = table()
    assert heads[1:] == [*COLUMNS, OURS]
    told = {row[0]: {head for head, cell in zip(heads[1:-1], row[1:-1], strict=True) if cell} for row in rows}
    assert told == {row: set(seen) for row, seen in CASES.items()}
    tried = {*SEEN_ALIVE, WORKER, BETWEEN, LEASE}
    assert tried == set(CASES)


def test_every_cell_of_our_worker_has_its_test() -> None:
    assert set(OF_OUR_WORKER) == set(CASES)
    for name in OF_OUR_WORKER.values():
        file, _, test = name.partition("::")
        text = (ROOT / "tests" / "bridge_worker" / file).read_text(encoding="utf-8")
        assert f"def {test}(" in text, name
