"""What may be stored and said about an error: a fixed kind and a bounded, safe summary; never a secret, a payload or a traceback (D10)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dbqueue import DBQueue, JobError, KeyTaken, QueueError
from dbqueue.clock import SECOND
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import Turn
from dbqueue.errors import SUMMARY_LIMIT, clean_summary, summary_of
from dbqueue.states import Kind, OnCrash, State
from tests.factory import insert, make, rows

pytestmark = pytest.mark.req("D10")

SECRET = "hunter2"


@pytest.fixture
def queue(database_url: str) -> Iterator[DBQueue]:
    queue = DBQueue(database_url)
    yield queue
    queue.close()


class OptedInError(JobError):
    """Its message is safe to store."""


class LeakyError(Exception):
    def __str__(self) -> str:
        raise AssertionError("nobody may read the text of a foreign exception")

    __repr__ = __str__


def raised(error: Exception) -> Exception:
    try:
        raise error from ValueError(SECRET)
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError(SECRET), "ValueError"),
        (LeakyError(SECRET), "LeakyError"),
        (KeyError(SECRET), "KeyError"),
        (OptedInError("card 1234 was refused"), "OptedInError: card 1234 was refused"),
        (OptedInError(), "OptedInError"),
        ("said by the program itself", "said by the program itself"),
    ],
)
def test_of_an_exception_only_the_class_is_stored_unless_it_opts_in(queue: DBQueue, error: Any, summary: str) -> None:
    queue.send("raw", {"password": SECRET}, max_attempts=1)
    claimed = queue.claim("raw", "me")
    assert claimed is not None
    claimed.retry(error if isinstance(error, str) else raised(error))
    record = queue.jobs()[0]
    assert (record.state, record.error_kind, record.error_summary) == ("dead", "failed", summary)
    (row,) = rows(queue.database).finished.values()
    assert SECRET.encode() in row.pop("payload")
    assert SECRET not in repr(row)
    assert SECRET not in repr(record)


@pytest.mark.parametrize("text", ["x" * 10_000, "\x00\ud800\n\t\x1b[31m", "ü" * 199 + "💥" * 5, ""])
def test_a_summary_is_bounded_and_storable(queue: DBQueue, text: str) -> None:
    queue.send("raw", 1)
    claimed = queue.claim("raw", "me")
    assert claimed is not None
    claimed.retry(OptedInError(text))
    stored = queue.jobs()[0].error_summary
    assert stored is not None
    assert stored == summary_of(OptedInError(text)) == clean_summary(stored)
    assert len(stored) <= SUMMARY_LIMIT
    assert stored.isprintable()


def test_nothing_but_the_fixed_kinds_is_ever_written(db: Database, session: OwnSession) -> None:
    kinds = [*Kind, None]
    settled = [
        make(db, State.RUNNING).settlement(state, kind, summary="x")
        for kind in kinds
        for state in (State.DEAD, State.BLOCKED, State.PENDING, State.SUCCEEDED, State.ACKED)
    ]
    db.dialect.turn(session, Turn(settled))
    for on_crash in OnCrash:
        for attempt in (1, 3):
            make(db, State.RUNNING, on_crash=int(on_crash), attempt=attempt)
    db.clock.offset += 61 * SECOND
    db.dialect.upkeep(session, 100, ("default",))
    found = rows(db)
    assert len(found.jobs) + len(found.finished) == len(settled) + 6
    written = {row["error_kind"] for row in [*found.jobs.values(), *found.finished.values()]}
    assert written == {None, *(kind.value for kind in Kind)}


def test_a_drivers_message_stays_with_the_driver(db: Database) -> None:
    """It may quote a row. The cause is there for a log that may say more."""
    job = make(db, key=SECRET)
    attempts: list[tuple[type[QueueError], Any]] = [
        (KeyTaken, lambda s: insert(db, s, "jobs", job.row | {"id": bytes(16), "payload": SECRET.encode()})),
        (QueueError, lambda s: s.execute(f"SELECT '{SECRET}' FROM {SECRET}_table")),
        (QueueError, lambda s: s.execute(f"INSERT INTO dbqueue_jobs (id) VALUES ('{SECRET}')")),
    ]
    for kind, verb in attempts:
        with pytest.raises(kind) as caught:
            db.run(verb)
        assert SECRET not in str(caught.value)
        assert SECRET not in repr(caught.value)
        assert caught.value.__cause__ is not None


@pytest.mark.databases("postgres")
def test_a_password_in_the_url_is_never_shown(database_url: str) -> None:
    password = database_url.split(":")[2].split("@")[0]
    database = Database(database_url.replace("/test", "/missing"))
    with pytest.raises(QueueError) as caught:
        database.ready()
    assert password not in f"{caught.value!r} {caught.value} {database!r} {database.label}"
