"""PostgreSQL 13 and newer: the verbs in full, in the order of ``dialect.Dialect``.

Two rules run through every statement here, both found by trying the obvious form and watching it fail:

* A clock is read *after* the row locks are held: ``locked`` is MATERIALIZED and ``clock`` aggregates over it. An UPDATE that
  waited for a holder who rolled back does not test its WHERE again, and a plain FOR UPDATE subquery lets the planner push
  the clock test below the lock; either would let an expired claim finish (D13).
* An index is compared with a clock only through a CTE: clock_timestamp() is volatile, and ``run_at <= clock_timestamp()``
  reads the whole index (100,000 future jobs: 53 ms instead of 0.4).

Rows are found by ``id = ANY(ARRAY(...))``, which leaves the planner nothing to choose, and LIMIT is a literal: with a
parameter there the generic plan looks dear and each execution is planned anew. Settle and renew never wait for a row.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

import sqlalchemy
from sqlalchemy.dialects.postgresql import psycopg as sqlalchemy_psycopg

from dbqueue.clock import Clock
from dbqueue.database.callers import CallerSession
from dbqueue.database.dialect import OwnSession, Params, Row, Session
from dbqueue.database.marks import Marks, step_limit
from dbqueue.database.postgres_statements import (
    _FOUND,
    ALREADY,
    CANCEL,
    CLAIM_MARKED,
    CLAIM_SWEEP,
    COUNT_PART,
    ENQUEUE,
    ENQUEUE_MANY,
    ENQUEUE_PLAIN,
    EXISTS,
    EXPIRE,
    GATE,
    INSERT_DUE,
    LOCK_CHORD,
    LOOK,
    MOVE_CURSORS,
    NOW,
    PATIENCE,
    PLANNING,
    PLANNING_FOR_GOOD,
    POST,
    PROBE,
    PROMOTE,
    PRUNE,
    RELEASE_UNKNOWN,
    RENEW,
    RESOLVE,
    RETRY_BLOCKED,
    RETRY_FINISHED,
    RING_MANY,
    RING_ONE,
    SETTLE,
    SETTLE_FAST,
    SHORTEN,
    STORE_RESULT,
)
from dbqueue.database.tables import (
    Changed,
    ChordCount,
    ClaimedRow,
    ClaimRequest,
    Due,
    Enqueued,
    Fact,
    Held,
    Letter,
    Move,
    Names,
    NewJob,
    Settlement,
    StoredResult,
    Turn,
    TurnResult,
)
from dbqueue.database.wire import Flight, Wire, array
from dbqueue.errors import ConfigError, ConnectionLost, DatabaseBusy, DatabaseError, KeyTaken, QueueError, SchemaMissing
from dbqueue.ids import as_bytes
from dbqueue.states import State, allowed

T = TypeVar("T")

PORTABLE_NOW = NOW.replace("%(offset)s", ":offset")
PORTABLE = {
    "{now}": PORTABLE_NOW, "{skip_locked}": "FOR UPDATE SKIP LOCKED", "{for_update}": "FOR UPDATE", "{share}": "FOR SHARE",
    "{among}": "= ANY(ARRAY(", "{end}": "))", "{instr}": 'pg_catalog."position"',
}  # fmt: skip

# SQLSTATEs that say: this connection, or the server behind it, is of no use now; take another one, after a while. 53 and 58 are a
# server that lacks memory, connections or room on its disk, or cannot read it: no row's fault, so nothing may be given up for it.
_CONNECTION_STATES = ("08", "57P01", "57P02", "57P03", "57P05", "25006", "25P03", "25P04", "53", "58", "3D000")
_LOCK_STATE = "55P03"
# 57014: somebody's pg_cancel_backend, or a statement_timeout of the role; it is no fault of what was written.
_BUSY_STATES = ("40001", "40P01", "55P03", "55006", "57014")
_MISSING_STATES = ("42P01", "3F000")
_KEY_STATE = "23505"


_IN_LANE = itemgetter(9, 1, 2)
"""Priority, queued_at and id of a claim's row."""

SOON = 60_000_000
"""Microseconds within which a job must be due for a sleeping worker to be told of it; no worker's poll is longer. What comes later, the
worker's own looks find in time. The producer cannot know how often that is."""

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
NOTHING: Mapping[str, Any] = {}
DEFAULTS = "SELECT current_setting('default_transaction_isolation'), current_setting('default_transaction_read_only')"


class PostgresSession:
    """One of dbqueue's own connections: autocommit, so a single statement is one round trip. ``of`` gives the same one for the same
    connection, with marks that know nothing: its next user may come much later."""

    @classmethod
    def of(cls, connection: Any) -> PostgresSession:
        session: PostgresSession | None = getattr(connection, "_dbqueue_session", None)
        if session is None:
            session = connection._dbqueue_session = cls(connection)
        session.marks = Marks()
        return session

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.changed = 0
        self.asked_at = math.inf
        """Since when a statement waits for its answer; for a watcher in another thread."""
        self.marks = Marks()
        self._wire = Wire(connection)
        self._cursor = connection.cursor(binary=True)
        self._dedicated = False
        self._plans_for_good: bool | None = False
        self._guarded: bool | None = None

    def execute(self, statement: str, params: Any = None) -> list[Row]:
        cursor = self._cursor
        if params:  # the driver's way with lists costs more than writing a thousand jobs
            params = {k: array(v) if type(v) is list else v for k, v in params.items()}
        self.asked_at = time.monotonic()
        try:
            cursor.execute(statement, params)
        finally:
            self.asked_at = math.inf
        self.changed = cursor.rowcount
        return cursor.fetchall() if cursor.description else []

    def send(self, statement: str, params: Mapping[str, Any]) -> list[Row]:
        """As ``execute``, for the one statement that a producer waits for: past the driver's cursor, which would be a third of its
        CPU time."""
        self.asked_at = time.monotonic()
        try:
            return self._wire.ask(statement, params)
        finally:
            self.asked_at = math.inf

    def send_all(self, *steps: tuple[str, Mapping[str, Any]]) -> list[list[Row]]:
        """As ``send`` for several statements, in one round trip; where no transaction is open, they are one."""
        return [rows for _, rows in self._run(steps)]

    @property
    def guarded(self) -> bool:
        """Most roles default to read committed and read write; for the others every transaction says so itself. Asked once a
        connection, and not when it is made: behind a pooler that would wait for a server."""
        if self._guarded is None:
            self._guarded = tuple(self.execute(DEFAULTS)[0]) != ("read committed", "off")
        return self._guarded

    def dedicate(self) -> None:
        self._dedicated, self._plans_for_good = True, None

    def _plans_are_set(self) -> bool:
        """A dedicated session sets its plans once, which saves a statement in each turn, if it talks to the server itself: a pooler
        shows a process number of its own, and would hand what we set to its other clients."""
        if self._plans_for_good is None:
            direct = self.connection.prepare_threshold is not None
            if direct and self.execute("SELECT pg_backend_pid()")[0][0] == self.connection.info.backend_pid:
                self.execute(PLANNING_FOR_GOOD)
                self._plans_for_good = True
            else:
                self._plans_for_good = False
        return self._plans_for_good

    def planned(self, *steps: tuple[str, Mapping[str, Any]]) -> list[tuple[int, list[Row]]]:
        """Statements of the worker as one pipelined transaction of their own, with the plans that they are meant to have."""
        return self.land(self.launch(*steps))

    def launch(self, *steps: tuple[str, Mapping[str, Any]]) -> tuple[Flight, slice]:
        """The first half of ``planned``, which does not wait for the answer; with it, where the answer lies among all."""
        first = [] if self._plans_are_set() else [(PLANNING, NOTHING)]
        last = []
        if self.guarded:
            first, last = [(BEGIN, NOTHING), *first], [("COMMIT", NOTHING)]
        self.asked_at = time.monotonic()
        try:
            return self._wire.launch([*first, *steps, *last]), slice(len(first), len(first) + len(steps))
        except BaseException:
            self.asked_at = math.inf
            raise

    def has_landed(self, flying: tuple[Flight, slice]) -> bool:
        return self._wire.has_landed(flying[0])

    def land(self, flying: tuple[Flight, slice]) -> list[tuple[int, list[Row]]]:
        """The second half of ``planned``: waits for the answer."""
        try:
            return self._wire.land(flying[0])[flying[1]]
        finally:
            self.asked_at = math.inf

    def _run(self, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[int, list[Row]]]:
        self.asked_at = time.monotonic()
        try:
            return self._wire.run(steps)
        finally:
            self.asked_at = math.inf

    def begin(self, deadline: float | None = None) -> None:
        # A role may default to serializable or read only; our own transactions say what they need.
        planning = [] if not self._dedicated or self._plans_are_set() else [(PLANNING, NOTHING)]
        self._run([(BEGIN, NOTHING), *planning, (f"SELECT {PATIENCE}", NOTHING)])

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback(self) -> None:
        self.execute("ROLLBACK")

    def close(self) -> None:
        self.connection.close()


@dataclass(frozen=True)
class TurnInFlight:
    """A turn that was sent and not answered yet."""

    session: PostgresSession
    turn: Turn
    steps: Sequence[tuple[str, str, Mapping[str, Any]]]
    began: float
    sent: tuple[Flight, slice]

    def has_landed(self) -> bool:
        """Takes what has come of the answer, and never waits."""
        return self.session.has_landed(self.sent)


class Postgres:
    name: ClassVar[str] = "postgresql"
    listens: ClassVar[bool] = True
    probes: ClassVar[bool] = False

    def __init__(
        self,
        url: sqlalchemy.URL,
        names: Names,
        clock: Clock,
        *,
        notify: bool = True,
        keep: bool = False,
    ) -> None:
        self.url, self.names, self.clock = url, names, clock
        self.notify, self.keep = notify, keep
        self._sqlalchemy = sqlalchemy_psycopg.dialect()  # type: ignore[no-untyped-call]
        fill = names.fill
        gate = GATE.replace("{queue}", "%(queue)s::text")
        self._enqueue, self._enqueue_plain = (
            fill(text if notify else text.replace(gate, "false")) for text in (ENQUEUE, ENQUEUE_PLAIN)
        )
        self._enqueue_many, self._exists = fill(ENQUEUE_MANY), fill(EXISTS)
        # On a connection of our own the statement stands alone, and brings its patience along.
        self._enqueue_own = self._enqueue.replace(" AS now)", f" AS now FROM (SELECT {PATIENCE}) patience)", 1)
        self._settle_fast, self._settle, self._already = fill(SETTLE_FAST), fill(SETTLE), fill(ALREADY)
        self._renew, self._probe, self._release_unknown = fill(RENEW), fill(PROBE), fill(RELEASE_UNKNOWN)
        self._look, self._shorten = fill(LOOK), fill(SHORTEN)
        self._insert_due, self._move_cursors = fill(INSERT_DUE), fill(MOVE_CURSORS)
        store = STORE_RESULT if notify else STORE_RESULT.replace(GATE.replace("{queue}", "%(bell)s::text"), "false")
        self._store_result, self._lock_chord, self._count_part = fill(store), fill(LOCK_CHORD), fill(COUNT_PART)
        self._portable: dict[str, str] = {}
        self._post = fill(POST).replace("{notify}", str(notify).lower())
        self._sweep_texts: dict[int, str] = {}
        self._marked_texts: dict[int, str] = {}

    # -- connections -------------------------------------------------------------------------------------------------

    def connect(self, url: sqlalchemy.URL | None = None) -> Any:
        try:
            import psycopg  # not at the top: a program on SQLite needs no PostgreSQL driver
        except ImportError as error:
            raise ConfigError(
                "a postgresql:// URL needs the driver psycopg 3, which is not installed: pip install 'celery-dbqueue[postgres]'"
            ) from error

        options: dict[str, Any] = dict((url or self.url).translate_connect_args(username="user", database="dbname"))
        options.update((url or self.url).query)
        options.update(_several(options.get("host")))
        if options.pop("pgbouncer", "false") == "true":  # in transaction mode: statements may be prepared elsewhere
            options["prepare_threshold"] = None
        options.setdefault("connect_timeout", 10)
        options.setdefault("application_name", "dbqueue")
        options.setdefault("client_encoding", "utf8")  # of a database in SQL_ASCII, texts would arrive as bytes
        # A peer that vanished without a word is noticed in about half a minute instead of the kernel's two hours.
        for name, value in (
            ("keepalives_idle", 10), ("keepalives_interval", 5), ("keepalives_count", 3), ("tcp_user_timeout", 25_000),
        ):  # fmt: skip
            options.setdefault(name, value)
        connection = psycopg.connect(**options, autocommit=True)
        for loader in _id_loaders():
            connection.adapters.register_loader("uuid", loader)
        return connection

    def connect_to_look(self) -> Any:
        return self.connect()

    def session(self, driver_connection: Any) -> PostgresSession:
        return PostgresSession.of(driver_connection)

    def classify(self, error: BaseException) -> type[QueueError] | None:
        """Which of our errors a driver's error is; None: not an error of the database. Works for psycopg 2 and 3 alike."""
        names = {cls.__name__ for cls in type(error).__mro__}
        if "DatabaseError" not in names and "InterfaceError" not in names:
            return None
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if state is None:
            return ConnectionLost if names & {"OperationalError", "InterfaceError"} else DatabaseError
        if state.startswith(_CONNECTION_STATES):
            return ConnectionLost
        if state in _BUSY_STATES:
            return DatabaseBusy
        if state in _MISSING_STATES:
            return SchemaMissing
        return KeyTaken if state == _KEY_STATE else DatabaseError

    def bind_id(self, value: bytes) -> str:
        return value.hex()

    def now(self, session: Session) -> int:
        return int(session.execute(f"SELECT {NOW}", self._clock())[0][0])

    def compile(self, core_statement: Any) -> tuple[str, dict[str, Any]]:
        compiled = core_statement.compile(dialect=self._sqlalchemy, compile_kwargs={"render_postcompile": True})
        return str(compiled), {k: v.hex() if isinstance(v, bytes) else v for k, v in compiled.params.items()}

    def portable(self, text: str) -> str:
        known = self._portable.get(text)
        if known is None:
            text_here = self.names.fill(text)
            for name, own in PORTABLE.items():
                text_here = text_here.replace(name, own)
            filled = re.sub(r"(?<!:):(\w+)", r"%(\1)s", text_here)
            known = self._portable[text] = filled
        return known

    def read_in_order(self, session: Session, text: str, params: Params) -> list[Row]:
        if isinstance(session, PostgresSession):
            return session.planned((text, params))[0][1]
        return session.execute(text, params)

    def among(self, column: str, values: Sequence[str]) -> tuple[str, dict[str, Any]]:
        return f"{column} = ANY(:values::text[])", {"values": list(values)}

    def _clock(self) -> dict[str, Any]:
        return {"offset": self.clock.offset}

    # -- schema ------------------------------------------------------------------------------------------------------

    def lock_schema(self, session: Session) -> None:
        """Until the transaction ends; a session's lock would leak through a transaction pooler."""
        session.execute("SET LOCAL lock_timeout = '10s'")
        session.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended('dbqueue.migrate' || %(salt)s::text, 0))",
            {"salt": self.names.salt},
        )
        # Not IF NOT EXISTS: that asks for the right to create schemas even when there is nothing to create.
        schema = f'"{self.names.schema}"'
        if session.execute("SELECT to_regnamespace(%(name)s::text)", {"name": schema})[0][0] is None:
            session.execute(f"CREATE SCHEMA {schema}")

    def schema_version(self, session: Session) -> int | None:
        if (
            session.execute("SELECT to_regclass(%(name)s::text)", {"name": self.names.qualified("migrations")})[0][0]
            is None
        ):
            return None
        return int(session.execute(self.names.fill("SELECT COALESCE(max(version), 0) FROM {migrations}"))[0][0])

    def run_script(self, session: OwnSession, script: str) -> None:
        session.connection.execute(script)

    def database_id(self, session: Session) -> str | None:
        if session.execute("SELECT to_regclass(%(name)s::text)", {"name": self.names.qualified("meta")})[0][0] is None:
            return None
        # With the database's own name: a copy (CREATE DATABASE ... TEMPLATE) carries the same id.
        rows = session.execute(
            self.names.fill("SELECT value || ' ' || current_database() FROM {meta} WHERE name = 'database_id'")
        )
        return as_text(rows[0][0]) if rows else None

    # -- producers ---------------------------------------------------------------------------------------------------

    def enqueue(self, session: Session, job: NewJob, database_id: str | None = None) -> Enqueued:
        params = self._new(job) | {
            "id": job.id.hex(), "task_id": job.task_id, "payload": job.payload, "key": job.key, "soon": SOON,
        }  # fmt: skip
        own = session if isinstance(session, PostgresSession) else None
        if job.key is None and isinstance(session, CallerSession) and session.finds(self._enqueue_plain, params):
            return Enqueued(job.id, duplicate=False)
        # No row: the holder of the key ended between our insert and our look. The next try sees a new snapshot.
        for _ in range(20):
            with _held_up() if own else nullcontext():
                rows = own.send(self._enqueue_own, params) if own else session.execute(self._enqueue, params)
            if rows:
                return Enqueued(as_bytes(rows[0][0]), bool(rows[0][1]))
        raise DatabaseBusy("other transactions kept taking and freeing this job's key; try again")

    def enqueue_many(self, session: Session, jobs: Sequence[NewJob], database_id: str | None = None) -> list[Enqueued]:
        if not jobs:
            return []
        out: dict[int, Enqueued] = {}
        left = list(range(len(jobs)))
        for _ in range(20):
            params = self._new(jobs[0]) | {
                "ids": [jobs[n].id.hex() for n in left],
                "keys": [jobs[n].key for n in left],
                "payloads": [jobs[n].payload for n in left],
            }
            with _held_up() if isinstance(session, PostgresSession) else nullcontext():
                rows = session.execute(self._enqueue_many, params)
            for ordinal, job_id, duplicate in rows:
                if job_id is not None:
                    out[left[ordinal - 1]] = Enqueued(as_bytes(job_id), bool(duplicate))
            left = [n for n in left if n not in out]
            if not left:
                break
        else:
            raise DatabaseBusy("other transactions kept taking and freeing these jobs' keys; try again")
        soon = jobs[0].run_at is not None or jobs[0].delay < SOON
        if self.notify and soon and not all(enqueued.duplicate for enqueued in out.values()):
            session.execute(RING_ONE, {"salt": self.names.salt, "queue": jobs[0].queue})
        return [out[n] for n in range(len(jobs))]

    def _new(self, job: NewJob) -> dict[str, Any]:
        return {
            "target": job.target, "fingerprint": job.fingerprint, "queue": job.queue, "priority": job.priority,
            "run_at": job.run_at, "delay": job.delay, "max_attempts": job.max_attempts, "timeout_ms": job.timeout_ms,
            "on_crash": int(job.on_crash), "source": job.source, "sequence": job.sequence, "head": job.head, "ttl": job.ttl,
            "offset": self.clock.offset, "salt": self.names.salt,
        }  # fmt: skip

    def exists(self, session: Session, job_id: bytes) -> bool:
        return bool(session.execute(self._exists, {"id": job_id.hex()}))

    def live(self, worker: str) -> None:
        """The lease tells: nobody's transaction keeps its owner from renewing."""

    # -- schedules ---------------------------------------------------------------------------------------------------

    def insert_due(self, session: Session, jobs: Sequence[NewJob]) -> set[bytes]:
        if not jobs:
            return set()
        params = self._clock() | {
            "ids": [job.id.hex() for job in jobs], "targets": [job.target for job in jobs],
            "fingerprints": [job.fingerprint for job in jobs], "payloads": [job.payload for job in jobs],
            "keys": [job.key for job in jobs], "queues": [job.queue for job in jobs],
            "priorities": [job.priority for job in jobs], "max_attempts": [job.max_attempts for job in jobs],
            "timeouts": [job.timeout_ms for job in jobs], "on_crash": [int(job.on_crash) for job in jobs],
            "sources": [job.source for job in jobs], "sequences": [job.sequence for job in jobs],
            "task_ids": [job.task_id for job in jobs], "run_ats": [job.run_at for job in jobs],
            "delays": [job.delay for job in jobs], "heads": [job.head for job in jobs], "ttls": [job.ttl for job in jobs],
        }  # fmt: skip
        ring = (RING_MANY, {"salt": self.names.salt, "queues": sorted({job.queue for job in jobs})})
        if isinstance(session, PostgresSession):
            patience = (f"SELECT {PATIENCE}", NOTHING)
            with _held_up():
                _, rows, *_ = session.send_all(patience, (self._insert_due, params), *([ring] if self.notify else []))
        else:
            rows = session.execute(self._insert_due, params)
            if self.notify and rows:
                session.execute(*ring)
        return {as_bytes(row[0]) for row in rows}

    def move_cursors(self, session: Session, moves: Sequence[Move]) -> int:
        session.execute(self._move_cursors, self._clock() | {
            "owners": [move.owner for move in moves], "names": [move.name for move in moves], "was": [move.was for move in moves],
            "last_slots": [move.last_slot for move in moves], "next_ats": [move.next_at for move in moves],
            "fired": [move.fired for move in moves], "errors": [move.error for move in moves],
        })  # fmt: skip
        return session.changed

    # -- results -----------------------------------------------------------------------------------------------------

    def store_result(self, session: Session, result: StoredResult) -> None:
        session.execute(self._store_result, self._clock() | {
            "task_id": result.task_id, "state": result.state, "meta": result.meta, "ttl": result.ttl, "bell": result.bell,
            "salt": self.names.salt,
        })  # fmt: skip

    def count_part(
        self, session: Session, group_id: str, task_id: str, part: int, meta: bytes, ttl: int | None
    ) -> ChordCount:
        row = session.execute(self._lock_chord, self._clock() | {"group_id": group_id, "ttl": ttl})[0]
        if row[0]:
            return ChordCount(0, None, True)
        params = {"group_id": group_id, "task_id": task_id, "part": part, "meta": meta}
        returned, size = session.execute(self._count_part, params)[0]
        return ChordCount(int(returned), None if size is None else int(size), False)

    # -- the log of short-lived messages -----------------------------------------------------------------------------

    def mail_session(self) -> None:
        """The log lies beside the other tables."""

    def post(self, session: Session, letter: Letter) -> None:
        session.execute(self._post, self._clock() | {
            "exchange": letter.exchange, "routing_key": letter.routing_key, "head": letter.head, "payload": letter.payload,
            "ttl": letter.ttl, "queues": list(letter.bells), "salt": self.names.salt,
        })  # fmt: skip

    # -- executors ---------------------------------------------------------------------------------------------------

    def turn(self, session: OwnSession, turn: Turn) -> TurnResult:
        """Settle, renew, claim as one pipelined round trip: its implicit transaction commits at the one Sync, so there is
        no BEGIN and no COMMIT to send. The claim stays last: nothing but the commit follows the locks that it takes."""
        return self.land(self.launch(session, turn, turn.looks))

    def launch(
        self, session: OwnSession, turn: Turn, more: Sequence[tuple[str, Mapping[str, Any]]] = ()
    ) -> TurnInFlight:
        """The first half of ``turn``: sends it, and does not wait. Nothing else may use the session until it has landed. ``more``:
        statements that read, to be answered in the same round trip (``TurnResult.more``)."""
        assert isinstance(session, PostgresSession)
        steps = [*self._steps(session, turn), *(("more", text, dict(params)) for text, params in more)]
        began = time.monotonic()
        return TurnInFlight(
            session, turn, steps, began, session.launch(*((statement, params) for _, statement, params in steps))
        )

    def land(self, flying: TurnInFlight) -> TurnResult:
        """The second half of ``turn``: waits for the answer, and asks what it leaves open."""
        session, turn, steps, began = flying.session, flying.turn, flying.steps, flying.began
        result = TurnResult()
        for (what, _, _), (count, rows) in zip(steps, session.land(flying.sent), strict=True):
            if what == "fast":
                if count == len(turn.settlements):
                    result.settled = [Fact.DONE] * count
                else:
                    result.settled = self._after_commit(
                        lambda: self.settle(session, turn.settlements), [Fact.BUSY] * len(turn.settlements)
                    )
            elif what == "settle":
                result.settled = self._after_commit(
                    lambda rows=rows: self._facts(session, turn.settlements, rows),  # type: ignore[misc]
                    _in_order(turn.settlements, rows),
                )
            elif what == "renew":
                result.renewed = _in_order(turn.renewals, rows)
            elif what == "more":
                result.more.append(rows)
            elif what in ("sweep", "marked"):
                assert turn.claim is not None
                self._claimed(session.marks, turn.claim, rows, result)
                result.whole = what == "sweep"
                if result.whole:
                    session.marks.swept("claim", began)
                elif (
                    len(result.claimed) < step_limit(turn.claim.limit)
                    and not (turn.prompt and result.claimed)
                    and session.marks.may_look("claim")
                ):
                    self._look_again(session, turn.claim, result)
        return result

    def _look_again(self, session: PostgresSession, claim: ClaimRequest, result: TurnResult) -> None:
        """Few or no jobs behind the marks are no answer: there are marks only where this worker claimed before, and it would
        go to sleep on what other lanes hold."""
        began = time.monotonic()
        _, text, params = self._sweep_step(replace(claim, limit=claim.limit - len(result.claimed)))
        nothing: list[Row] = []
        rows = self._after_commit(lambda: session.planned((text, params))[0][1], nothing)
        if rows:
            self._claimed(session.marks, claim, rows, result)
            result.whole = True
            session.marks.swept("claim", began)

    def _after_commit(self, ask: Callable[[], T], otherwise: T) -> T:
        """The turn is committed: what is asked after it may be refused, but must not hide what the turn claimed."""
        try:
            return ask()
        except Exception as error:
            if self.classify(error) in (None, ConnectionLost):
                raise
            return otherwise

    def _steps(self, session: PostgresSession, turn: Turn) -> list[tuple[str, str, dict[str, Any]]]:
        steps: list[tuple[str, str, dict[str, Any]]] = []
        if turn.settlements:
            if all(s.plain for s in turn.settlements):
                steps.append(
                    (
                        "fast",
                        self._settle_fast,
                        self._clock() | _identity_arrays(turn.settlements) | {"keep": self.keep},
                    )
                )
            else:
                steps.append(("settle", self._settle, self._settle_params(turn.settlements)))
                queues = sorted({s.queue for s in turn.settlements if s.state is State.PENDING and s.delay < SOON})
                if queues and self.notify:
                    steps.append(("ring", RING_MANY, {"salt": self.names.salt, "queues": queues}))
        if turn.renewals:
            steps.append(
                ("renew", self._renew, self._clock() | _identity_arrays(turn.renewals) | {"lease": turn.lease})
            )
        if turn.claim is not None and turn.claim.limit > 0:
            steps.append(self._claim_step(session.marks, turn.claim))
        return steps

    def _claim_step(self, marks: Marks, claim: ClaimRequest) -> tuple[str, str, dict[str, Any]]:
        lanes = marks.lanes_of(claim.queues)
        if not lanes or marks.sweep_due("claim"):
            return self._sweep_step(claim)
        limit, params = self._claim_params(claim)
        text = self._marked_texts.get(limit) or self._marked_texts.setdefault(limit, self._text(CLAIM_MARKED, limit))
        return (
            "marked",
            text,
            params
            | {
                "queues": [lane[0] for lane in lanes],
                "priorities": [lane[1] for lane in lanes],
                "mark_at": [lane[2] for lane in lanes],
                "mark_id": [lane[3].hex() for lane in lanes],
            },
        )

    def _sweep_step(self, claim: ClaimRequest) -> tuple[str, str, dict[str, Any]]:
        limit, params = self._claim_params(claim)
        text = self._sweep_texts.get(limit) or self._sweep_texts.setdefault(limit, self._text(CLAIM_SWEEP, limit))
        return "sweep", text, params | {"queues": list(claim.queues)}

    def _claim_params(self, claim: ClaimRequest) -> tuple[int, dict[str, Any]]:
        limit = step_limit(claim.limit)
        return limit, self._clock() | {"token": claim.token.hex(), "worker": claim.worker, "lease": claim.lease}

    def _text(self, template: str, limit: int) -> str:
        return self.names.fill(template).replace("{limit}", str(limit)).replace("{notify}", str(self.notify).lower())

    def _claimed(self, marks: Marks, claim: ClaimRequest, rows: list[Row], result: TurnResult) -> None:
        result.now = now = rows[0][0]
        marks.saw(now)
        if rows[0][2] is None:
            return
        rows.sort(key=_IN_LANE)  # RETURNING has no order
        if len(claim.queues) > 1:
            place = {queue: n for n, queue in enumerate(claim.queues)}
            rows.sort(key=lambda row: place[row[8]])
        token, lane = claim.token, {}
        for _, queued_at, job_id, task_id, target, fingerprint, payload, key, queue, priority, *rest in rows:
            result.claimed.append(
                ClaimedRow(job_id, token, task_id, target, fingerprint, payload, key, queue, priority, queued_at, *rest)
            )
            lane[queue, priority] = (queued_at, job_id)
        for (queue, priority), (queued_at, job_id) in lane.items():
            marks.claimed(queue, priority, queued_at, job_id)

    def settle(self, session: Session, settlements: Sequence[Settlement]) -> list[Fact]:
        return self._facts(session, settlements, session.execute(self._settle, self._settle_params(settlements)))

    def _settle_params(self, settlements: Sequence[Settlement]) -> dict[str, Any]:
        ids, tokens = _identities(settlements)
        return self._clock() | {
            "ids": ids,
            "tokens": tokens,
            "states": [int(s.state) for s in settlements],
            "kinds": [None if s.kind is None else s.kind.value for s in settlements],
            "summaries": [s.summary for s in settlements],
            "delays": [s.delay for s in settlements],
            "refunds": [int(s.refund) for s in settlements],
            "payloads": [s.payload for s in settlements],
            "keep": self.keep,
        }

    def _facts(self, session: Session, settlements: Sequence[Settlement], rows: list[Row]) -> list[Fact]:
        facts = _in_order(settlements, rows)
        lost = [s for s, fact in zip(settlements, facts, strict=True) if fact is Fact.LOST]
        if lost:
            known = session.execute(self._already, {"ids": [s.id.hex() for s in lost]})
            already = {(as_bytes(job_id), as_bytes(token), state) for job_id, token, state in known if token}
            facts = [
                Fact.ALREADY if fact is Fact.LOST and (s.id, s.token, s.state) in already else fact
                for s, fact in zip(settlements, facts, strict=True)
            ]
        return facts

    def renew(self, session: Session, held: Sequence[Held], lease: int) -> list[Fact]:
        ids, tokens = _identities(held)
        return _in_order(
            held, session.execute(self._renew, self._clock() | {"ids": ids, "tokens": tokens, "lease": lease})
        )

    def probe(self, session: OwnSession, queues: tuple[str, ...]) -> bool:
        return bool(session.execute(self._probe, {"queues": list(queues)})[0][0])

    def release_unknown(self, session: OwnSession, worker: str, known: Sequence[Held]) -> int:
        assert isinstance(session, PostgresSession)
        params = self._clock() | _identity_arrays(known) | {"worker": worker}
        return session.planned((self._release_unknown, params))[0][0]

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def upkeep(self, session: OwnSession, limit: int, queues: tuple[str, ...], *, expire: bool = True) -> Due:
        """Makes due jobs claimable and takes back jobs whose lease ended. One look, and where it has found something two bounded
        statements in one transaction. Without ``expire`` only the first: waiting jobs are due to the moment, lost ones can wait a part
        of their lease."""
        assert isinstance(session, PostgresSession)
        marks, began = session.marks, time.monotonic()
        whole = marks.sweep_due("upkeep")
        waiting, lease = (0, 0) if whole else (marks.waiting, marks.lease)
        look = {"waiting": waiting, "lease": lease, "queues": list(queues) if whole else []}
        if not marks.shortened:
            session.planned((self._shorten, self._clock()))
            marks.shortened = True
        now, due, lapsed, ready, next_run = session.planned((self._look, self._clock() | look))[0][1][0]
        promoted = again = dead = unknown = 0
        if due or (expire and lapsed):
            params = self._clock() | {"salt": self.names.salt}
            steps = [(self._text(PROMOTE, limit), params | {"mark": waiting})]
            if expire:
                steps.append((self._text(EXPIRE, limit), params | {"mark": lease}))
            answers = session.planned(*steps)
            now, promoted, next_run, _ = answers[0][1][0]
            if expire:
                now, again, dead, unknown, _ = answers[1][1][0]
        marks.saw(now)
        if promoted < limit:
            marks.waiting = now - marks.LAG
        if expire and again + dead + unknown < limit:
            marks.lease = now - marks.LAG
        if whole:
            marks.swept("upkeep", began)
        more = promoted >= limit or again + dead + unknown >= limit
        return Due(now, promoted, again, dead, unknown, now if more else next_run, None, bool(ready))

    def prune(self, session: Session, states: Sequence[State], before: int, limit: int) -> int:
        total = 0
        session.execute(PLANNING)
        for state in states:
            if total < limit:
                session.execute(self._text(PRUNE, limit - total), {"state": int(state), "before": before})
                total += session.changed
        return total

    # -- by hand -----------------------------------------------------------------------------------------------------

    def cancel(self, session: Session, job_id: bytes) -> Changed:
        found = self._found(session, job_id)
        session.execute(self.names.fill(CANCEL), self._clock() | {"id": job_id.hex()})
        return Changed(found, session.changed == 1)

    def retry(self, session: Session, job_id: bytes) -> Changed:
        params = self._clock() | {"id": job_id.hex()}
        found = self._found(session, job_id)
        if found is State.BLOCKED:
            rows = session.execute(self.names.fill(RETRY_BLOCKED), params)
            if not rows:  # its key is taken, unless somebody else moved it at this moment
                return Changed(found, False, "key" if self._found(session, job_id) is State.BLOCKED else None)
            return self._revived(session, Changed(found, True), rows[0][0])
        if found is None or not allowed("retry", found):
            return Changed(found, False)
        rows = session.execute(self.names.fill(RETRY_FINISHED), params)
        if not rows:
            return Changed(found, False)
        state, kept, moved, queue = rows[0]
        reason = None if moved else "payload" if not kept else "key"
        return self._revived(session, Changed(State(state), bool(moved), reason), queue)

    def _revived(self, session: Session, changed: Changed, queue: Any) -> Changed:
        if changed.moved and self.notify:
            session.execute(RING_ONE, {"salt": self.names.salt, "queue": as_text(queue)})
        return changed

    def resolve(self, session: Session, job_id: bytes, state: State, expected_updated_at: int) -> Changed:
        found = self._found(session, job_id)
        params = self._clock() | {"id": job_id.hex(), "state": int(state), "expected": expected_updated_at}
        session.execute(self.names.fill(RESOLVE), params)
        moved = session.changed == 1
        return Changed(found, moved, "stale" if found is State.UNKNOWN and not moved else None)

    def _found(self, session: Session, job_id: bytes) -> State | None:
        state = session.execute(self.names.fill(_FOUND), {"id": job_id.hex()})[0][0]
        return None if state is None else State(state)


# A refused connection has no SQLSTATE, and the message may not be shown: it names hosts and users. In other languages than English
# nothing fits, and the class alone is told.
_REFUSALS = {
    "too many clients": "too many connections", "connection slots are reserved": "too many connections",
    "starting up": "the server is starting up", "shutting down": "the server is shutting down",
    "not yet accepting": "the server is starting up", "in recovery mode": "the server is starting up",
    "read-only": "the server is read only", "hot standby mode is disabled": "the server is a standby that lets nobody in",
    "authentication failed": "wrong user or password", "no password supplied": "the URL has no password",
    "pg_hba.conf": "the server does not let this host and user in", "does not exist": "no such user or database",
    "could not translate host name": "unknown host", "onnection refused": "nobody listens at this address",
    "timeout": "no answer in time", "timed out": "no answer in time", "No route": "no way to this host",
    "closed the connection": "the server closed it",
}  # fmt: skip


DENIALS = frozenset(
    {
        "wrong user or password",
        "the URL has no password",
        "the server does not let this host and user in",
        "no such user or database",
    }
)
"""Refusals that the next try will hear as well, unless somebody changes the server or the URL."""


def refusal(error: BaseException) -> str | None:
    """Why a connection was refused or ended, in words of ours."""
    text = str(error)
    return next((reason for phrase, reason in _REFUSALS.items() if phrase in text), None)


def _several(hosts: Any) -> dict[str, str]:
    """``?host=a:5432&host=b:5433``, as SQLAlchemy writes several hosts, in libpq's own way; for a failover, with
    ``target_session_attrs=read-write``."""
    if not isinstance(hosts, tuple):
        return {}
    pairs = [host.rpartition(":") if ":" in host else (host, "", "5432") for host in hosts]
    return {"host": ",".join(pair[0].strip("[]") for pair in pairs), "port": ",".join(pair[2] for pair in pairs)}


@contextmanager
def _held_up() -> Iterator[None]:
    """Who waits on a connection of ours may be waiting for itself, and is told so."""
    try:
        yield
    except Exception as error:
        if getattr(error, "sqlstate", None) != _LOCK_STATE:
            raise
        raise DatabaseBusy(
            "another open transaction has written a job with this key, or locks dbqueue's tables, and did not end in time. If it is "
            "this thread's own, make the call inside using(...), or commit first; else try again (LockNotAvailable 55P03)"
        ) from error


@cache
def _id_loaders() -> tuple[Any, Any]:
    """Ids as 16 bytes, in both wire formats: no UUID object is ever made in the worker's loop."""
    from psycopg.adapt import Loader
    from psycopg.pq import Format

    class FromBinary(Loader):
        format = Format.BINARY

        def load(self, data: Any) -> bytes:
            return bytes(data)

    class FromText(Loader):
        format = Format.TEXT

        def load(self, data: Any) -> bytes:
            return bytes.fromhex(bytes(data).decode().replace("-", ""))

    return FromBinary, FromText


def as_text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _identities(claims: Sequence[Settlement] | Sequence[Held]) -> tuple[list[str], list[str]]:
    return [c.id.hex() for c in claims], [c.token.hex() for c in claims]


def _identity_arrays(claims: Sequence[Settlement] | Sequence[Held]) -> dict[str, str]:
    """The same in PostgreSQL's own spelling, for the wire: each turn of a busy worker sends some hundred of them."""
    ids, tokens = _identities(claims)
    return {"ids": "{" + ",".join(ids) + "}", "tokens": "{" + ",".join(tokens) + "}"}


def _in_order(claims: Sequence[Settlement] | Sequence[Held], rows: list[Row]) -> list[Fact]:
    """By id and token: a worker that lost a claim and took the same job again asks about both."""
    facts = {(as_bytes(job_id), as_bytes(token)): Fact(as_text(fact)) for job_id, token, fact in rows}
    return [facts[c.id, c.token] for c in claims]
