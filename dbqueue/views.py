"""Reading jobs, for people and programs. Nothing here writes.

A job is one record to every reader, whether it is unfinished (``jobs``) or moved to the history (``finished``): each view is one
UNION ALL statement over both, since two selects could both miss a job that moves back in between. Written once in SQLAlchemy
Core; each dialect compiles it, and the text runs on any session, the caller's included.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, case, func, literal, null, select, text, union_all

from dbqueue.clock import to_datetime
from dbqueue.database.dialect import Dialect, Row, Session
from dbqueue.database.tables import BEST_PRIORITY
from dbqueue.ids import as_bytes
from dbqueue.states import OnCrash, State

_SHOWN = (
    "id", "task_id", "target", "key", "queue", "priority", "state", "run_at", "attempt", "lapses", "max_attempts", "timeout_ms",
    "on_crash", "worker", "error_kind", "error_summary", "source", "sequence", "created_at", "started_at",
)  # fmt: skip
_ONLY_UNFINISHED = ("ready_at", "lease_until", "updated_at")


@dataclass(frozen=True)
class JobRecord:
    """What the database knows of one job (D7). The payload is read only where it is asked for, and never shown by repr."""

    id: UUID
    task_id: str | None
    target: str
    key: str | None
    queue: str
    priority: int
    state: str
    run_at: datetime
    attempt: int
    lapses: int
    max_attempts: int
    timeout: float | None
    on_crash: str
    worker: str | None
    error_kind: str | None
    error_summary: str | None
    source: str | None
    sequence: int | None
    created_at: datetime
    started_at: datetime | None
    ready_at: datetime | None
    lease_until: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    fingerprint: str | None
    payload: bytes | None = None

    def __repr__(self) -> str:
        return f"<JobRecord {self.id} {self.target} {self.state} attempt {self.attempt}/{self.max_attempts}>"


@dataclass(frozen=True)
class QueueDepth:
    """How many jobs a queue holds by state, and how long its oldest claimable job has waited."""

    queue: str
    ready: int
    waiting: int
    running: int
    blocked: int
    unknown: int
    oldest_age: float | None


def get(dialect: Dialect, session: Session, job_id: bytes, *, with_payload: bool = False) -> JobRecord | None:
    """The newest record of this id: an unfinished job, else its last end."""
    rows = _run(dialect, session, _records(dialect, with_payload, id=job_id).order_by("rank", _newest()).limit(1))
    return _record(rows[0]) if rows else None


def find(
    dialect: Dialect,
    session: Session,
    *,
    states: tuple[State, ...] = (),
    queue: str | None = None,
    target: str | None = None,
    key: str | None = None,
    task_id: str | None = None,
    limit: int = 100,
    offset: int = 0,
) -> list[JobRecord]:
    """Jobs that match everything given, the ones changed last first."""
    statement = _records(dialect, False, states, queue=queue, target=target, key=key, task_id=task_id)
    return [
        _record(row) for row in _run(dialect, session, statement.order_by(_newest(), "id").limit(limit).offset(offset))
    ]


def depths(dialect: Dialect, session: Session, queue: str | None = None) -> list[QueueDepth]:
    jobs, _ = dialect.names.tables
    now = dialect.now(session)

    def count(condition: ColumnElement[bool]) -> ColumnElement[Any]:
        return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)

    pending = jobs.c.state == int(State.PENDING)
    statement = select(
        jobs.c.queue,
        count(jobs.c.ready_at.is_not(None)),
        count(pending & jobs.c.ready_at.is_(None) & (jobs.c.run_at > now)),
        count(pending & jobs.c.ready_at.is_(None) & (jobs.c.run_at <= now)),
        *(count(jobs.c.state == int(state)) for state in (State.RUNNING, State.BLOCKED, State.UNKNOWN)),
        func.min(case((pending & (jobs.c.run_at <= now), func.coalesce(jobs.c.ready_at, jobs.c.run_at)))),
    ).group_by(jobs.c.queue)
    if queue is not None:
        statement = statement.where(jobs.c.queue == queue)
    return [
        QueueDepth(
            _text(name) or "", int(ready) + int(due), int(waiting), int(running), int(blocked), int(unknown),
            None if oldest is None else max(0.0, (now - int(oldest)) / 1e6),
        )
        for name, ready, waiting, due, running, blocked, unknown, oldest in _run(dialect, session, statement.order_by(jobs.c.queue))
    ]  # fmt: skip


def counts(dialect: Dialect, session: Session, queue: str | None = None) -> dict[str, int]:
    """How many jobs are in each state, the history included; states without a job are left out."""
    parts = []
    for table in dialect.names.tables:
        part = select(table.c.state.label("state"), func.count().label("n")).group_by(table.c.state)
        parts.append(part if queue is None else part.where(table.c.queue == queue))
    rows = _run(dialect, session, union_all(*parts))
    return {State(state).label: int(n) for state, n in sorted((int(state), n) for state, n in rows)}


def _records(dialect: Dialect, with_payload: bool, states: tuple[State, ...] = (), **equal: Any) -> Select[Any]:
    jobs, finished = dialect.names.tables
    parts = []
    for rank, table in enumerate((jobs, finished)):
        columns: list[Any] = [table.c[name] for name in _SHOWN]
        columns += [table.c[name] if rank == 0 else null().label(name) for name in _ONLY_UNFINISHED]
        columns += [null().label("finished_at") if rank == 0 else table.c.finished_at, table.c.fingerprint]
        columns += [table.c.payload if with_payload else null().label("payload"), literal(rank).label("rank")]
        part = select(*columns).where(*(table.c[name] == value for name, value in equal.items() if value is not None))
        parts.append(part.where(table.c.state.in_([int(s) for s in states])) if states else part)
    both = union_all(*parts).subquery("both")
    return select(both)


def _newest() -> Any:
    return text("coalesce(finished_at, updated_at) DESC")


def _run(dialect: Dialect, session: Session, statement: Any) -> list[Row]:
    text, params = dialect.compile(statement)
    return session.execute(text, params)


def _record(row: Row) -> JobRecord:
    """Any driver's row: texts may arrive as bytes, ids as UUID or text, payloads as memoryview."""
    shown = dict(zip((*_SHOWN, *_ONLY_UNFINISHED, "finished_at", "fingerprint", "payload"), row, strict=False))
    texts = {name: _text(shown[name]) for name in ("task_id", "key", "worker", "error_kind", "error_summary", "source")}
    instants = {
        name: None if shown[name] is None else to_datetime(int(shown[name]))
        for name in ("started_at", "ready_at", "lease_until", "finished_at")
    }
    changed = shown["finished_at"] if shown["updated_at"] is None else shown["updated_at"]
    return JobRecord(
        id=UUID(bytes=as_bytes(shown["id"])),
        target=_text(shown["target"]) or "",
        queue=_text(shown["queue"]) or "",
        priority=BEST_PRIORITY - int(shown["priority"]),
        state=State(shown["state"]).label,
        run_at=to_datetime(int(shown["run_at"])),
        attempt=int(shown["attempt"]),
        lapses=int(shown["lapses"]),
        max_attempts=int(shown["max_attempts"]),
        timeout=None if shown["timeout_ms"] is None else int(shown["timeout_ms"]) / 1000,
        on_crash=OnCrash(shown["on_crash"]).label,
        sequence=shown["sequence"],
        created_at=to_datetime(int(shown["created_at"])),
        updated_at=to_datetime(int(changed)),
        fingerprint=None if shown["fingerprint"] is None else bytes(shown["fingerprint"]).hex(),
        payload=None if shown["payload"] is None else bytes(shown["payload"]),
        **texts,  # type: ignore[arg-type]
        **instants,  # type: ignore[arg-type]
    )


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else bytes(value).decode()
