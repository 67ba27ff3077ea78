"""The verbs of a job by hand: what an application or an operator does to a job it does not own.

Each is one transition of ``states.MOVES`` on the caller's session: it never commits, logs or sleeps, and a process that dies
before the commit has changed nothing. Executors do not come here: they settle, renew and claim in batches
(``dialect.Dialect.turn``), fenced by their claim's token.
"""

from __future__ import annotations

from dbqueue.database.dialect import Dialect, Session
from dbqueue.database.tables import Changed
from dbqueue.errors import IllegalMove, InvalidArgument, JobNotFound, KeyTaken, StaleUpdate
from dbqueue.ids import as_uuid
from dbqueue.states import State, allowed

BY_HAND = ("cancel", "retry", "resolve")
"""The verbs of this module."""


def cancel(dialect: Dialect, session: Session, job_id: bytes) -> State:
    """Ends a pending, blocked or running job as cancelled; returns the state it was in. A running job's worker learns of it when it
    renews or settles: its result is not recorded (D13). Raises JobNotFound, IllegalMove."""
    return _moved("cancel", job_id, dialect.cancel(session, job_id))


def retry(dialect: Dialect, session: Session, job_id: bytes) -> State:
    """Makes a blocked, dead, cancelled or ended job pending again under its id, due now; an ended one with a fresh count of attempts.
    Returns the state it was in. Raises JobNotFound, IllegalMove, KeyTaken (D8)."""
    return _moved("retry", job_id, dialect.retry(session, job_id))


def resolve(dialect: Dialect, session: Session, job_id: bytes, state: State, expected_updated_at: int) -> State:
    """Decides about a job whose outcome is unknown: succeeded or discarded, if it is still as it was read (H7). Raises
    JobNotFound, IllegalMove, StaleUpdate."""
    if state not in (State.SUCCEEDED, State.DISCARDED):
        raise InvalidArgument(
            'an unknown job is resolved as "succeeded" or "discarded"; a plain requeue could run it twice'
        )
    return _moved("resolve", job_id, dialect.resolve(session, job_id, state, expected_updated_at))


def _moved(verb: str, job_id: bytes, changed: Changed) -> State:
    if changed.moved:
        assert changed.found is not None
        return changed.found
    name = as_uuid(job_id)
    if changed.found is None:
        raise JobNotFound(f"there is no job {name}, or its history was pruned")
    if changed.reason == "key":
        raise KeyTaken(
            f"job {name} was not retried: another unfinished job of its target has its key; wait for it or cancel it"
        )
    if changed.reason == "payload":
        raise IllegalMove(
            f"job {name} was not retried: the payload of jobs that succeeded is not kept (DBQueue(keep_payload=True) keeps it)"
        )
    if changed.reason == "stale":
        raise StaleUpdate(f"job {name} changed since it was read: read it again and decide anew")
    if allowed(verb, changed.found):  # it moved between our look and our write
        raise StaleUpdate(f"job {name} changed at this moment: read it again")
    others = [other for other in BY_HAND if allowed(other, changed.found)]
    raise IllegalMove(
        f"job {name} is {changed.found.label}: the verb {verb!r} does not apply to it; nothing changed. "
        f"In this state there is {' and '.join(others) or 'no verb left: enqueue a new job'}"
    )
