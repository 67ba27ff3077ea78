"""The doctor: looks at a database and at the settings that lead there, and says what is wrong and what cures it.

``examine`` runs its checks in a fixed order, the ones first that the others stand on. None of them changes anything
that stays: a transaction is only begun to be rolled back, and a notification goes to a queue that nobody else has.

What can fail, and what then happens: a database that cannot be reached, or has no schema of this version, is no finding
but the error that every other command raises too. A check that is refused, or that waits for somebody's lock, becomes a
warning of its own name, and the others go on. Where a first check makes the rest meaningless (a folder that cannot be
written to, a user without any right) they are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from dbqueue.database import migrate
from dbqueue.database.postgres import Postgres
from dbqueue.doctor import beat, broker, jobs, postgres, sqlite
from dbqueue.doctor.check import Check, Finding, Patient, Status
from dbqueue.errors import ConnectionLost, QueueError, SchemaMissing, SchemaOutdated, SchemaTooNew
from dbqueue.queue import DBQueue

__all__ = ["Finding", "Status", "examine"]

PATIENCE = 60.0
"""Seconds: workers make due jobs claimable at every poll, and look for lost leases every second."""

LOCK_TIMEOUT, STATEMENT_TIMEOUT = "1s", "20s"
"""Counting a million jobs takes a second or two; nobody shall wait for the doctor."""


def examine(
    queue: DBQueue, *, with_targets: bool = False, role: str | None = None, patience: float = PATIENCE
) -> list[Finding]:
    """All findings, in the order of the checks. ``with_targets``: the queue's targets are declared, so stored jobs are
    compared with them. ``role``: what the connection's user is for (a name of ``privileges.ROLES``; None: everything).
    Raises ConnectionLost, SchemaMissing, SchemaOutdated, SchemaTooNew."""
    patient = Patient(queue, with_targets, role, patience)
    of_database = postgres if isinstance(queue.database.dialect, Postgres) else sqlite
    try:
        return list(
            _findings(patient, of_database.FIRST, (*of_database.CHECKS, *jobs.CHECKS, *beat.CHECKS, *broker.CHECKS))
        )
    finally:
        patient.close()


def _findings(patient: Patient, first: Sequence[Check], rest: Sequence[Check]) -> Iterator[Finding]:
    yield jobs.python(tuple(sys.version_info[:3]))
    for check in first:
        yield _made(patient, check)
        if "stop" in patient.notes:
            return
    yield _made(patient, Check("schema", _schema))
    for check in (*rest, *(jobs.WITH_TARGETS if patient.with_targets else ())):
        yield _made(patient, check)


def _made(patient: Patient, check: Check) -> Finding:
    try:
        with patient.database.errors(), _bounds(patient) if check.bounded else nullcontext():
            return check.run(patient)
    except ConnectionLost:
        raise
    except QueueError as error:
        if isinstance(error, (SchemaMissing, SchemaOutdated, SchemaTooNew)) and "schema" not in patient.notes:
            raise
        told = f"this could not be looked at: {error}"
        return Finding(
            check.name, Status.WARNING, told, "run the doctor again, as a user who may, when nobody holds a lock"
        )


@contextmanager
def _bounds(patient: Patient) -> Iterator[None]:
    """Reads need no transaction on SQLite; on a server one carries the timeouts, which a pooler would else hand on to
    others."""
    if not isinstance(patient.database.dialect, Postgres):
        yield
        return
    session = patient.session
    session.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
    try:
        session.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        session.execute(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'")
        yield
    finally:
        session.rollback()


def _schema(patient: Patient) -> Finding:
    migrate.check(patient.database.dialect, patient.session)
    version = patient.database.dialect.schema_version(patient.session)
    patient.notes.add("schema")
    return Finding("schema", Status.OK, f"version {version}, the one that this code knows")
