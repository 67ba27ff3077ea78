"""What the Kombu transport leaves behind when nobody clears it away: rows of dead consumers, queues that nobody uses any more, and the
log of short-lived messages; and results that nobody prunes. Alike on every database.

The log and its cursors may be empty, or gone with the server's last crash: that is no finding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dbqueue import clock, routing
from dbqueue.database.dialect import Session
from dbqueue.database.postgres import as_text
from dbqueue.database.sqlite import Sqlite
from dbqueue.doctor.check import Check, Finding, Patient, Problem, Status, counted, listed, verdict

LEFT_S = 180.0
"""Seconds after which what is over has been cleared away, if any consumer lives: each does so twice a minute."""
MANY_QUEUES = 100
MANY_LETTERS = 100_000
"""A letter lives for five minutes at most, an event for five seconds, so this is much even for a large installation."""

RESULTS_LEFT_S = 86_400.0
MANY_RESULTS = 10_000
"""Expired results beyond this are not counted."""

_REMEDY = "start a worker or a monitor on this broker: any consumer clears them away"


def consumers(patient: Patient) -> Finding:
    dialect, session = patient.database.dialect, patient.session
    before = _long_ago(patient)
    problems = []
    found = session.execute(
        dialect.portable(
            "SELECT queue, count(*) FROM {consumers} WHERE alive_until < :before GROUP BY queue ORDER BY queue"
        ),
        {"before": before},
    )
    if found:
        queues = listed([repr(as_text(row[0])) for row in found])
        number = counted(sum(int(row[1]) for row in found), "consumer")
        told = f"{number} died without a word more than {LEFT_S:g} s ago and nobody cleared up after them (queues: {queues})"
        problems.append(Problem(Status.WARNING, told, _REMEDY))
    unused = routing.abandoned_queues(dialect, session, round(LEFT_S * clock.SECOND))
    if len(unused) > MANY_QUEUES:
        told = f"{len(unused)} queues have expired or outlived their consumers, and nobody deletes them"
        problems.append(Problem(Status.WARNING, told, _REMEDY))
    alive = session.execute(
        dialect.portable("SELECT count(*) FROM {consumers} WHERE alive_until >= :before"), {"before": before}
    )[0][0]
    return verdict("consumers", problems, f"{counted(int(alive), 'consumer')} of the transport, none of them dead")


def letters(patient: Patient) -> Finding:
    """The log is bounded by the life of what is in it, as long as somebody deletes what expired."""
    dialect = patient.database.dialect
    with _log(patient) as session:
        if session is None:
            return Finding("letters", Status.OK, "nobody has used remote control, events or replies yet")
        some = f"(SELECT expires_at FROM {{mail}} LIMIT {MANY_LETTERS + 1}) some_letters"
        number, over = session.execute(
            dialect.portable(
                f"SELECT count(*), COALESCE(sum(CASE WHEN expires_at < :before THEN 1 ELSE 0 END), 0) FROM {some}"
            ),
            {"before": _long_ago(patient)},
        )[0]
    problems = []
    if over:
        told = f"{counted(int(over), 'short-lived message')} expired more than {LEFT_S:g} s ago and nobody deletes them"
        problems.append(Problem(Status.WARNING, told, _REMEDY))
    elif number > MANY_LETTERS:
        told = f"the log of short-lived messages holds more than {MANY_LETTERS} of them, which every reader of events reads"
        remedy = "send fewer events (start workers without -E, or stop monitors that nobody watches), or lower event_queue_ttl"
        problems.append(Problem(Status.WARNING, told, remedy))
    return verdict("letters", problems, f"{counted(int(number), 'short-lived message')} in the log")


def results(patient: Patient) -> Finding:
    """Whoever stores results deletes some that have expired, once a minute; who stores few may be behind, but not by a day."""
    dialect, before = patient.database.dialect, patient.now - round(RESULTS_LEFT_S * clock.SECOND)
    left = []
    for table in ("results", "groups", "chords"):
        some = f"(SELECT 1 FROM {{{table}}} WHERE expires_at < :before LIMIT {MANY_RESULTS + 1}) some_rows"
        number = int(
            patient.session.execute(dialect.portable(f"SELECT count(*) FROM {some}"), {"before": before})[0][0]
        )
        if number:
            left.append(f"{'more than ' if number > MANY_RESULTS else ''}{min(number, MANY_RESULTS)} {table}")
    problems = []
    if left:
        told = f"{' and '.join(left)} expired more than a day ago and are still there"
        remedy = "let `celery beat` run (its celery.backend_cleanup), or call app.backend.cleanup() now and then"
        problems.append(Problem(Status.WARNING, told, remedy))
    return verdict("results", problems, "no result has expired more than a day ago")


@contextmanager
def _log(patient: Patient) -> Iterator[Session | None]:
    """Where the log is. None: in a file that does not exist yet, and that to look would make."""
    dialect = patient.database.dialect
    if isinstance(dialect, Sqlite) and not os.path.exists(dialect.mail_path):
        yield None
        return
    own = dialect.mail_session()
    try:
        yield own or patient.session
    finally:
        if own is not None:
            own.close()


def _long_ago(patient: Patient) -> int:
    return patient.now - round(LEFT_S * clock.SECOND)


CHECKS = (Check("consumers", consumers), Check("letters", letters), Check("results", results))
