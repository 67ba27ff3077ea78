"""What a database has to give: the contract of the dialect files, in the order in which both list their operations.

A verb works on a ``Session``, which is either one of dbqueue's own connections or the caller's (``joined``). It never commits,
logs or sleeps, and returns a fact. Verbs whose one statement must hold a lock before it reads the clock are written in full
in each dialect; what every database runs alike is in ``views``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from dbqueue.clock import Clock
from dbqueue.database.alive import Alive
from dbqueue.database.tables import (
    Changed,
    ChordCount,
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
from dbqueue.errors import QueueError
from dbqueue.states import State

Row = Sequence[Any]
Params = Mapping[str, Any]


class Session(Protocol):
    """A connection on which verbs run. ``execute`` returns all rows (none for a statement without a result); ``changed`` is
    the row count of the last statement."""

    changed: int

    def execute(self, statement: str, params: Params | None = None) -> list[Row]: ...


class Dialect(Protocol):
    name: ClassVar[str]
    listens: ClassVar[bool]
    """Whether waking takes a connection of its own (LISTEN)."""
    probes: ClassVar[bool]
    """Whether an idle worker reads before it writes, since a claim that finds nothing takes the one write lock."""

    names: Names
    clock: Clock

    # connections
    def connect(self) -> Any: ...
    def connect_to_look(self) -> Any: ...
    def session(self, driver_connection: Any) -> OwnSession: ...
    def classify(self, error: BaseException) -> type[QueueError] | None: ...
    def bind_id(self, value: bytes) -> Any: ...
    def now(self, session: Session) -> int: ...
    def compile(self, core_statement: Any) -> tuple[str, dict[str, Any]]: ...
    def portable(self, text: str) -> str:
        """A text that every database runs, with ``:name`` for parameters, table names and ``now`` in braces, as this one takes it.
        ``{skip_locked}`` at the end of a subselect: rows are taken in its order, and none is waited for, where rows are locked;
        ``{for_update}``: they are waited for; ``{share}``: nobody changes the rows before this transaction has ended.
        ``{among}`` and ``{end}`` around a subselect: it is run once. (With a plain IN a planner may run it for each row anew, and with
        a LIMIT behind locked rows it finds others each time.) ``{instr}``: the function that finds bytes in bytes."""

    def read_in_order(self, session: Session, text: str, params: Params) -> list[Row]:
        """One statement that reads along an index and stops at its LIMIT, whatever the table's statistics say; outside of a
        transaction of ours, or in a caller's, where the planner is left alone."""

    def among(self, column: str, values: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """A condition of a portable text that the column has one of these values, of which there is one at least, and its parameters.
        There are few texts, however many values, so each is prepared."""

    # schema
    def lock_schema(self, session: Session) -> None: ...
    def schema_version(self, session: Session) -> int | None: ...
    def run_script(self, session: OwnSession, script: str) -> None: ...
    def database_id(self, session: Session) -> str | None: ...

    # producers
    def enqueue(self, session: Session, job: NewJob, database_id: str | None = None) -> Enqueued: ...
    def enqueue_many(
        self, session: Session, jobs: Sequence[NewJob], database_id: str | None = None
    ) -> list[Enqueued]: ...
    def exists(self, session: Session, job_id: bytes) -> bool: ...

    def live(self, worker: str) -> Alive | None:
        """Says of a worker that its process lives, until it is closed; None: the lease alone tells."""

    # schedules
    def insert_due(self, session: Session, jobs: Sequence[NewJob]) -> set[bytes]:
        """Writes jobs of any kinds, messages too; returns the ids of those written: not where another unfinished job has the key, and
        not what is there already. On a connection of our own it is one round trip, where rows can be sent together."""

    def move_cursors(self, session: Session, moves: Sequence[Move]) -> int:
        """Each by compare-and-set on where the cursor was; returns how many moved."""

    # results
    def store_result(self, session: Session, result: StoredResult) -> None: ...
    def count_part(
        self, session: Session, group_id: str, task_id: str, part: int, meta: bytes, ttl: int | None
    ) -> ChordCount:
        """Counts a part once, and holds the chord's row until the transaction ends."""

    # the log of short-lived messages
    def mail_session(self) -> OwnSession | None: ...
    def post(self, session: Session, letter: Letter) -> None: ...

    # executors
    def turn(self, session: OwnSession, turn: Turn) -> TurnResult: ...
    def settle(self, session: Session, settlements: Sequence[Settlement]) -> list[Fact]: ...
    def renew(self, session: Session, held: Sequence[Held], lease: int) -> list[Fact]: ...
    def probe(self, session: OwnSession, queues: tuple[str, ...]) -> bool: ...
    def release_unknown(self, session: OwnSession, worker: str, known: Sequence[Held]) -> int: ...

    # upkeep
    def upkeep(self, session: OwnSession, limit: int, queues: tuple[str, ...], *, expire: bool = True) -> Due: ...
    def prune(self, session: Session, states: Sequence[State], before: int, limit: int) -> int: ...

    # by hand
    def cancel(self, session: Session, job_id: bytes) -> Changed: ...
    def retry(self, session: Session, job_id: bytes) -> Changed: ...
    def resolve(self, session: Session, job_id: bytes, state: State, expected_updated_at: int) -> Changed: ...


class OwnSession(Session, Protocol):
    """A connection that dbqueue opened itself, in autocommit mode: here, and only here, transactions begin and end."""

    connection: Any

    @property
    def guarded(self) -> bool:
        """A statement outside of ``begin`` would not run as our transactions must: the role's defaults are other ones."""

    def dedicate(self) -> None:
        """From here on the session serves one worker's turns and nothing else, until it is closed."""

    def begin(self, deadline: float | None = None) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...
