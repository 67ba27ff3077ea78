"""SQLite 3.24 and newer in WAL mode with synchronous=FULL: the verbs in full, in the order of ``dialect.Dialect``.

There is one writer at a time, so the rule of D13 becomes simple: every verb runs inside BEGIN IMMEDIATE, reads the clock
after that lock is held, and uses it as a parameter. No row can change in between, so nothing here answers "busy".
No RETURNING (it needs 3.35, and a cursor that is not drained makes COMMIT fail).

Waiting for the write lock is ours: SQLite's busy_timeout backs off so far that 5 of 8 writers got one transaction in four
seconds. Our connections use timeout 0 and try BEGIN IMMEDIATE again every 0.5 to 2 ms.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import sqlite3
import time
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.dialects.sqlite import pysqlite

from dbqueue.clock import SQLITE_NOW, Clock
from dbqueue.database import touched
from dbqueue.database.alive import Alive, is_alive, own_workers
from dbqueue.database.dialect import OwnSession, Params, Row, Session
from dbqueue.database.forks import GatedConnection, writers
from dbqueue.database.tables import (
    CLAIMED_COLUMNS,
    FINISHED_COLUMNS,
    JOB_COLUMNS,
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
from dbqueue.errors import (
    ConfigError,
    ConnectionLost,
    DatabaseBusy,
    DatabaseError,
    DifferentDatabase,
    KeyTaken,
    QueueError,
    SchemaMissing,
    TransactionTooOld,
    WouldDeadlock,
)
from dbqueue.ids import as_bytes
from dbqueue.states import State

LOCK_PATIENCE = 10.0
"""Seconds that our own transactions try for the write lock before they raise DatabaseBusy."""

TURN_PATIENCE = 0.5
UPKEEP_PATIENCE = 0.5
"""Upkeep can wait for its next round; the worker that does it has leases to renew."""
SPARED, SPARED_BEFORE = 5_000_000, 500_000
"""Microseconds by which the claim of a living owner is prolonged, and for its owner's turn how long before its end already: a turn
reads the clock more than once."""

CHECKPOINT_CHANGES, VAIN_SHARE = 1_500, 20
"""A worker checkpoints after so many changed rows; tries that move nothing may take a twentieth of its time."""

_NEW_COLUMNS = (
    "id, task_id, target, fingerprint, payload, key, queue, priority, state, run_at, ready_at, max_attempts, timeout_ms, "
    "on_crash, source, sequence, head, expires_at, created_at, updated_at"
)

# The first statement in a caller's transaction must be a write: a read first would take a snapshot that a later write may
# find too old. So the check that this is the queue's own database stands inside the insert.
ENQUEUE = f"""
INSERT INTO {{jobs}} ({_NEW_COLUMNS})
SELECT :id, :task_id, :target, :fingerprint, :payload, :key, :queue, :priority, 0, COALESCE(:run_at, now + :delay),
  CASE WHEN COALESCE(:run_at, now + :delay) <= now THEN now END,
  :max_attempts, :timeout_ms, :on_crash, :source, :sequence, :head, now + :ttl, now, now
FROM (SELECT {SQLITE_NOW} + :offset AS now)
WHERE :database_id IS NULL OR EXISTS (SELECT 1 FROM {{meta}} WHERE name = 'database_id' AND value = :database_id)
ON CONFLICT DO NOTHING
"""

KEY_HOLDER = """
SELECT id FROM {jobs} WHERE id = :id UNION ALL
SELECT id FROM {jobs} WHERE target = :target AND key = :key AND key IS NOT NULL AND state IN (0, 1, 3)
"""

EXISTS = "SELECT 1 FROM {jobs} WHERE id = :id UNION ALL SELECT 1 FROM {finished} WHERE id = :id LIMIT 1"

MOVE_CURSOR = f"""
UPDATE {{schedules}} SET last_slot = :last_slot, next_at = :next_at, planned = spec || ' ' || timezone, fired = fired + :fired,
  fired_at = CASE WHEN :fired > 0 THEN {SQLITE_NOW} + :offset ELSE fired_at END, error = :error, updated_at = {SQLITE_NOW} + :offset
WHERE owner = :owner AND name = :name AND last_slot = :was
"""

STORE_RESULT = f"""
INSERT INTO {{results}} AS r (task_id, state, meta, expires_at, stored_at)
SELECT :task_id, :state, :meta, now + :ttl, now FROM (SELECT {SQLITE_NOW} + :offset AS now) WHERE 1 = 1
ON CONFLICT (task_id) DO UPDATE SET state = excluded.state, meta = excluded.meta, expires_at = excluded.expires_at,
  stored_at = excluded.stored_at
WHERE r.state <> 'SUCCESS' OR r.expires_at <= excluded.stored_at
"""
LOCK_CHORD = f"""
INSERT INTO {{chords}} AS c (group_id, expires_at) VALUES (:group_id, {SQLITE_NOW} + :offset + :ttl)
ON CONFLICT (group_id) DO UPDATE SET expires_at = CASE WHEN c.done THEN c.expires_at ELSE excluded.expires_at END
"""
CHORD = "SELECT returned, size + extra, done FROM {chords} WHERE group_id = :group_id"
WRITE_PART = """
INSERT INTO {chord_parts} (group_id, task_id, part, meta) VALUES (:group_id, :task_id, :part, :meta) ON CONFLICT DO NOTHING
"""
COUNT_PART = "UPDATE {chords} SET returned = returned + :counted WHERE group_id = :group_id"

MAIL_TABLE = """
CREATE TABLE IF NOT EXISTS {mail} (id INTEGER PRIMARY KEY AUTOINCREMENT, exchange TEXT NOT NULL, routing_key TEXT NOT NULL,
  head BLOB NOT NULL, payload BLOB NOT NULL, expires_at INTEGER NOT NULL)
"""
CURSORS_TABLE = "CREATE TABLE IF NOT EXISTS {cursors} (queue TEXT NOT NULL PRIMARY KEY, position INTEGER NOT NULL)"
POST = f"""
INSERT INTO {{mail}} (exchange, routing_key, head, payload, expires_at)
VALUES (:exchange, :routing_key, :head, :payload, {SQLITE_NOW} + :offset + :ttl)
"""

NOW = f"SELECT {SQLITE_NOW} + :offset"

# Whoever writes has the whole file, so no row is locked.
PORTABLE = {
    "{now}": f"({SQLITE_NOW} + :offset)", " {skip_locked}": "", " {for_update}": "", " {share}": "", "{among}": "IN (", "{end}": ")",
    "{instr}": "instr",
}  # fmt: skip

CLAIM_LOOK = """
SELECT id, task_id, target, fingerprint, payload, key, queue, priority, attempt + 1, lapses, max_attempts, timeout_ms, on_crash,
  head, expires_at, ready_at
FROM {jobs} WHERE queue = :queue AND ready_at IS NOT NULL ORDER BY priority, ready_at, id LIMIT :limit
"""

CLAIM_TAKE = """
UPDATE {jobs} SET state = 1, attempt = attempt + 1, token = :token, worker = :worker, lease_until = :lease_until, queued_at = ready_at,
  ready_at = NULL, started_at = :now, updated_at = :now WHERE id = :id AND ready_at IS NOT NULL
"""

_MOVED = ", ".join(
    name for name in FINISHED_COLUMNS if name not in ("state", "finished_at", "payload", "error_kind", "error_summary")
)


def _moved(other: dict[str, str]) -> str:
    """The moved columns in their order, some of them with another value."""
    return ", ".join(other.get(name, name) for name in _MOVED.split(", "))


FINISH = f"""
INSERT INTO {{finished}} ({_MOVED}, payload, error_kind, error_summary, state, finished_at)
SELECT {_MOVED}, CASE WHEN :keep THEN payload END, :kind, :summary, :state, :now FROM {{jobs}}
WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now
"""

REMOVE = "DELETE FROM {jobs} WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now"

# The token stays until the next claim, and with a finished job for ever: the same settlement asked again is "already", not lost.
PUT_BACK = """
UPDATE {jobs} SET state = :state, lease_until = NULL, attempt = attempt - :refund, lapses = lapses + (:kind IS 'crashed'),
  payload = COALESCE(:payload, payload), max_attempts = max_attempts + (:payload IS NOT NULL),
  error_kind = COALESCE(:kind, error_kind), error_summary = CASE WHEN :kind IS NULL THEN error_summary ELSE :summary END,
  run_at = CASE WHEN :state = 0 AND :delay >= 0 AND (:refund = 0 OR :delay > 0) THEN :now + :delay ELSE run_at END,
  ready_at = CASE WHEN :state = 0 AND :delay = 0 THEN :now WHEN :state = 0 AND :delay < 0 THEN COALESCE(queued_at, :now) END,
  updated_at = :now
WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now
"""

# +state keeps the planner from the index for pruning, with which it would read all jobs that ever ended so.
ALREADY = """
SELECT 1 FROM {jobs} WHERE id = :id AND token = :token AND state = :state UNION ALL
SELECT 1 FROM {finished} WHERE id = :id AND token = :token AND +state = :state
"""

RENEW = "UPDATE {jobs} SET lease_until = :until, updated_at = :now WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now"

PROBE = "SELECT 1 FROM {jobs} WHERE queue = :queue AND ready_at IS NOT NULL LIMIT 1"

RELEASE_UNKNOWN = """
UPDATE {jobs} SET state = 0, token = NULL, lease_until = NULL, attempt = attempt - 1, ready_at = :now, updated_at = :now
WHERE state = 1 AND worker = :worker AND id = :id
"""
# One whose lease has ended may have begun: it is a lapse, for the sweep.
RUNNING_OF = "SELECT id, token FROM {jobs} WHERE state = 1 AND worker = :worker AND lease_until > :now"

# After the clock went back: a claim that was renewed in what is now the future counts as renewed now. Its worker, if it lives, does so
# in time; if it died, the job would wait for the clock to come round to the old end of its lease.
AHEAD = f"""
SELECT 1 FROM {{jobs}} WHERE state = 1 AND lease_until > {SQLITE_NOW} + :offset AND updated_at > {SQLITE_NOW} + :offset LIMIT 1
"""
SHORTEN = """
UPDATE {jobs} SET lease_until = :now + (lease_until - updated_at), updated_at = :now
WHERE state = 1 AND lease_until > :now AND updated_at > :now
"""

ANY_DUE = f"""
SELECT now, EXISTS (SELECT 1 FROM {{jobs}} WHERE state = 0 AND ready_at IS NULL AND run_at <= now),
  EXISTS (SELECT 1 FROM {{jobs}} WHERE state = 1 AND lease_until <= now),
  (SELECT min(run_at) FROM {{jobs}} WHERE state = 0 AND ready_at IS NULL), (SELECT min(lease_until) FROM {{jobs}} WHERE state = 1)
FROM (SELECT {SQLITE_NOW} + :offset AS now)
"""

PROMOTE = """
UPDATE {jobs} SET ready_at = :now, updated_at = :now WHERE id IN (
  SELECT id FROM {jobs} WHERE state = 0 AND ready_at IS NULL AND run_at <= :now ORDER BY run_at, id LIMIT :limit)
  AND state = 0 AND ready_at IS NULL
"""

EXPIRED = """
SELECT id, CASE WHEN on_crash = 1 THEN 3 WHEN on_crash = 2 OR attempt >= max_attempts THEN 6 ELSE 0 END, worker
FROM {jobs} WHERE state = 1 AND lease_until <= :now ORDER BY lease_until LIMIT :limit
"""
# Its owner lives and could not write: it renews as soon as it can, and is not asked about again at every poll until then.
SPARE = "UPDATE {jobs} SET lease_until = :until WHERE id = :id"
# The owner itself came first: nobody took what it holds, whatever its leases say.
SPARE_OWN = "UPDATE {jobs} SET lease_until = :until WHERE state = 1 AND lease_until <= :soon AND worker = :worker"
EXPIRE_BACK = """
UPDATE {jobs} SET state = :state, token = NULL, lease_until = NULL, lapses = lapses + 1, error_kind = 'crashed', error_summary = NULL,
  ready_at = CASE WHEN :state = 0 THEN :now END, updated_at = :now WHERE id = :id
"""

# Only a settle leaves its token in the history: whoever asks again with the token of a cancelled or expired claim has lost it.
EXPIRE_DEAD = f"""
INSERT INTO {{finished}} ({_MOVED}, payload, error_kind, error_summary, state, finished_at)
SELECT {_moved({"token": "NULL", "lapses": "lapses + 1"})}, payload, 'crashed', NULL, 6, :now FROM {{jobs}} WHERE id = :id
"""
DELETE_BY_ID = "DELETE FROM {jobs} WHERE id = :id"

PRUNE = """
DELETE FROM {finished} WHERE rowid IN (
  SELECT rowid FROM {finished} WHERE state = :state AND finished_at < :before ORDER BY finished_at LIMIT :limit)
"""

# In a caller's transaction the first statement must be a write (see ENQUEUE); this one changes nothing.
TAKE_LOCK = "UPDATE {jobs} SET updated_at = updated_at WHERE id = :id"
FOUND_UNFINISHED = "SELECT state, updated_at, queue FROM {jobs} WHERE id = :id"
FOUND_FINISHED = """
SELECT state, finished_at, payload IS NOT NULL FROM {finished} WHERE id = :id ORDER BY finished_at DESC LIMIT 1
"""

# For a verb by hand: the move keeps what the row said about its error.
MOVE_AS_IT_IS = f"""
INSERT INTO {{finished}} ({_MOVED}, payload, error_kind, error_summary, state, finished_at)
SELECT {_moved({"token": "NULL"})}, payload, error_kind, error_summary, :state, :now FROM {{jobs}} WHERE id = :id
"""

_BACK = ", ".join(name for name in JOB_COLUMNS if name not in (
    "state", "attempt", "lapses", "run_at", "ready_at", "queued_at", "token", "worker", "lease_until", "started_at", "updated_at",
))  # fmt: skip
REVIVE = f"""
INSERT INTO {{jobs}} ({_BACK}, state, attempt, lapses, run_at, ready_at, updated_at)
SELECT {_BACK}, 0, 0, 0, :now, :now, :now FROM {{finished}} WHERE id = :id AND finished_at = :finished_at
ON CONFLICT DO NOTHING
"""
FORGET = "DELETE FROM {finished} WHERE id = :id AND finished_at = :finished_at"
UNBLOCK = """
UPDATE {jobs} SET state = 0, run_at = :now, ready_at = :now, updated_at = :now,
  token = NULL, attempt = CASE WHEN attempt >= max_attempts THEN 0 ELSE attempt END
WHERE id = :id AND state = 2 AND NOT EXISTS (SELECT 1 FROM {jobs} k
  WHERE k.target = {jobs}.target AND k.key = {jobs}.key AND k.key IS NOT NULL AND k.state IN (0, 1, 3))
"""

_BUSY, _LOCKED, _CANNOT_OPEN, _NOT_A_DATABASE, _SNAPSHOT = 5, 6, 14, 26, 517
# Read-only, I/O error, full disk, cannot open: another try, on a new connection, may succeed.
_CONNECTION_CODES = {8, 10, 13, _CANNOT_OPEN}


class OwnConnection(GatedConnection):
    """Knows which file it opened. The name may lead to another one by now, or nowhere, and SQLite goes on in the old one without a
    word: what is written there is gone."""

    def opened(self, path: str) -> None:
        self._path, self._file = os.path.abspath(path), _file_of(path)

    def check(self) -> None:
        """Raises ConnectionLost. A look at the folder, two microseconds."""
        if _file_of(self._path) != self._file:
            raise ConnectionLost(_GONE if _file_of(self._path) is None else _REPLACED)


def _file_of(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_GONE = "the SQLite file of this queue was deleted or moved away while it was in use; put it back, or stop and start anew with another"
_REPLACED = "the SQLite file of this queue was replaced by another one while it was in use"


class SqliteSession:
    """One of dbqueue's own connections; outside a transaction each statement commits by itself."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.guarded = False
        self.changed = 0
        self.seen, self.shortened = 0, False
        """The database's clock as it was seen last, and whether claims from the future were looked for since it went back."""
        self._cursor = connection.cursor()
        self._checkpoint_at, self._checkpoint_after = math.inf, 0
        self._moved = 0

    def execute(self, statement: str, params: Any = None) -> list[Row]:
        cursor = self._cursor.execute(statement, params or {})
        self.changed = cursor.rowcount
        return cursor.fetchall()

    def execute_all(self, statement: str, params: Sequence[Any]) -> int:
        """Runs the statement once for each set of parameters; returns the sum of the row counts."""
        return self._cursor.executemany(statement, params).rowcount

    def dedicate(self) -> None:
        """A worker commits hundreds of times a second, and moves the log into the file itself. SQLite would try after every commit
        once the log is long, and each try sorts all of it, in vain as long as somebody reads an old snapshot."""
        self._cursor.execute("PRAGMA wal_autocheckpoint=0")
        self._checkpoint_at = 0.0

    def begin(self, deadline: float | None = None) -> None:
        """Takes the write lock; ``deadline`` is a time of time.monotonic(). Raises WouldDeadlock when this thread holds it."""
        until = time.monotonic() + LOCK_PATIENCE if deadline is None else deadline
        suspicious: float | None = time.monotonic() + touched.SUSPICION
        while True:
            writers.enter(self)
            try:
                self._cursor.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                writers.leave(self)
                if primary_code(error) not in (_BUSY, _LOCKED) or time.monotonic() >= until:
                    raise
            if suspicious is not None and time.monotonic() >= suspicious:
                suspicious = None  # what this thread holds cannot change while it waits here
                if touched.holds_lock(self._cursor.execute("PRAGMA database_list").fetchone()[2]):
                    raise WouldDeadlock(
                        "this thread has an open transaction on the same SQLite file (it was given to using(...) before); dbqueue's "
                        "own connection would wait for it for ever. Make the call inside the using(...) block, or commit first"
                    )
            time.sleep(random.uniform(0.0005, 0.002))

    def check(self) -> None:
        if isinstance(self.connection, OwnConnection):
            self.connection.check()

    def commit(self) -> None:
        self._cursor.execute("COMMIT")
        if time.monotonic() >= self._checkpoint_at and self.connection.total_changes >= self._checkpoint_after:
            self._checkpoint()
        writers.leave(self)

    def _checkpoint(self) -> None:
        began, moved = time.monotonic(), self._moved
        with contextlib.suppress(sqlite3.Error):  # what was to be done is committed; the next statement tells
            _, _, self._moved = self._cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()[0]
        now = time.monotonic()
        # One that moves something is worth its time, and without it the log would outgrow every pause.
        self._checkpoint_at = now if self._moved != moved else now + VAIN_SHARE * (now - began)
        self._checkpoint_after = self.connection.total_changes + CHECKPOINT_CHANGES

    def rollback(self) -> None:
        if self.connection.in_transaction:
            self._cursor.execute("ROLLBACK")
        writers.leave(self)

    def close(self) -> None:
        self.connection.close()
        writers.leave(self)


class Sqlite:
    name: ClassVar[str] = "sqlite"
    listens: ClassVar[bool] = False
    probes: ClassVar[bool] = True

    def __init__(self, url: sqlalchemy.URL, names: Names, clock: Clock, *, keep: bool = False) -> None:
        self.url, self.names, self.clock, self.keep = url, names, clock, keep
        self.path = check_path(url)
        self._sqlalchemy = pysqlite.dialect(paramstyle="named")
        self._texts: dict[str, str] = {}
        self._known = False

    # -- connections -------------------------------------------------------------------------------------------------

    def connect(self, url: sqlalchemy.URL | None = None) -> sqlite3.Connection:
        """Creates the file only as long as this program has not seen its tables: a file that went away afterwards took them with it."""
        if self._known and not os.path.exists(self.path):
            raise ConnectionLost(_GONE)
        try:
            connection = sqlite3.connect(
                self.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=256,
                factory=OwnConnection,
            )  # fmt: skip
            try:
                self._prepare(connection)
                connection.opened(self.path)
                if self._known and self.database_id(self.session(connection)) is None:
                    raise ConnectionLost(f"{_REPLACED}, which has none of dbqueue's tables")
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            self._explain(error)
            raise
        return connection

    def connect_to_look(self) -> sqlite3.Connection:
        """Creates no file and leaves the journal mode alone: the schema may be missing, and this thread in a transaction on the file."""
        try:
            uri = f"file:{quote(os.path.abspath(self.path))}?mode=rw"
            return sqlite3.connect(uri, uri=True, timeout=1, isolation_level=None, factory=GatedConnection)
        except sqlite3.OperationalError:
            if os.path.exists(self.path):
                raise
            raise SchemaMissing(
                "the SQLite file of this queue does not exist yet: run `dbqueue migrate` or call queue.migrate() at start-up"
            ) from None

    def _explain(self, error: sqlite3.Error) -> None:
        """Raises ours in its place when the trouble is the path, which SQLite does not tell."""
        path, code = os.path.realpath(self.path), primary_code(error)
        folder = os.path.dirname(path)
        if code == _NOT_A_DATABASE:
            raise DatabaseError(
                f"{path} is no SQLite database (or an encrypted or damaged one), and was left as it is: correct the URL, or "
                "move the file away"
            ) from error
        if code != _CANNOT_OPEN:
            return
        if _is_missing(folder):
            problem = f"the folder {folder} does not exist: create it, or correct the URL"
            if not os.path.isabs(self.path):
                problem += " (three slashes begin a path relative to the working folder, four an absolute one)"
        elif os.path.isdir(path):
            problem = f"{path} is a folder: name a file in it"
        else:
            problem = f"{path} may not be read and written, or made, by this user: change the owner or mode of it or its folder"
        raise ConnectionLost(f"the SQLite database cannot be opened: {problem}") from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                    raise ConfigError(
                        "this SQLite database cannot use write-ahead logging (a network or read-only file system?); "
                        "dbqueue needs it: put the file on a local disk"
                    )
                break
            except sqlite3.OperationalError as error:  # another process switches it, or recovers, at this moment
                if primary_code(error) not in (_BUSY, _LOCKED) or time.monotonic() >= until:
                    raise
            time.sleep(random.uniform(0.001, 0.005))
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=OFF")

    def session(self, driver_connection: sqlite3.Connection) -> SqliteSession:
        session = SqliteSession(driver_connection)
        session.check()
        return session

    def classify(self, error: BaseException) -> type[QueueError] | None:
        """Which of our errors a driver's error is; None: not an error of the database."""
        if not isinstance(error, sqlite3.Error):
            return None
        if isinstance(error, sqlite3.IntegrityError):
            return KeyTaken if "UNIQUE" in str(error) else DatabaseError
        if getattr(error, "sqlite_errorcode", None) == _SNAPSHOT:
            return TransactionTooOld
        code = primary_code(error)
        if code in (_BUSY, _LOCKED):
            return DatabaseBusy
        if code in _CONNECTION_CODES:
            return ConnectionLost
        return SchemaMissing if "no such table" in str(error) else DatabaseError

    def bind_id(self, value: bytes) -> bytes:
        return value

    def now(self, session: Session) -> int:
        return int(session.execute(NOW, {"offset": self.clock.offset})[0][0])

    def compile(self, core_statement: Any) -> tuple[str, dict[str, Any]]:
        compiled = core_statement.compile(dialect=self._sqlalchemy, compile_kwargs={"render_postcompile": True})
        return str(compiled), dict(compiled.params)

    def portable(self, text: str) -> str:
        known = self._texts.get(text)
        if known is None:
            known = self.names.fill(text)
            for name, own in PORTABLE.items():
                known = known.replace(name, own)
            self._texts[text] = known
        return known

    def read_in_order(self, session: Session, text: str, params: Params) -> list[Row]:
        return session.execute(text, params)

    def among(self, column: str, values: Sequence[str]) -> tuple[str, dict[str, Any]]:
        width = 1 << (len(values) - 1).bit_length()  # filled up by repeating the last
        names = {f"v{n}": values[min(n, len(values) - 1)] for n in range(width)}
        return f"{column} IN ({', '.join(':' + name for name in names)})", names

    def _text(self, template: str) -> str:
        return self._texts.get(template) or self._texts.setdefault(template, self.names.fill(template))

    # -- schema ------------------------------------------------------------------------------------------------------

    def lock_schema(self, session: Session) -> None:
        """BEGIN IMMEDIATE has locked the file already."""

    def schema_version(self, session: Session) -> int | None:
        table = f"{self.names.prefix}migrations"
        if not session.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :name", {"name": table}):
            return None
        return int(session.execute(self._text("SELECT COALESCE(max(version), 0) FROM {migrations}"))[0][0])

    def run_script(self, session: OwnSession, script: str) -> None:
        """executescript would commit the transaction first, so SQLite itself tells where a statement ends."""
        statement = ""
        for line in script.splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):
                session.execute(statement)
                statement = ""
        if re.sub(r"--[^\n]*|\s", "", statement):
            raise ValueError("the script's last statement is not complete")

    def database_id(self, session: Session) -> str | None:
        table = f"{self.names.prefix}meta"
        if not session.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :name", {"name": table}):
            return None
        rows = session.execute(self._text("SELECT value FROM {meta} WHERE name = 'database_id'"))
        self._known = self._known or bool(rows)
        return rows[0][0] if rows else None

    # -- producers ---------------------------------------------------------------------------------------------------

    def enqueue(self, session: Session, job: NewJob, database_id: str | None = None) -> Enqueued:
        params = {
            "id": job.id, "task_id": job.task_id, "target": job.target, "fingerprint": job.fingerprint, "payload": job.payload,
            "key": job.key, "queue": job.queue, "priority": job.priority, "run_at": job.run_at, "delay": job.delay,
            "max_attempts": job.max_attempts, "timeout_ms": job.timeout_ms, "on_crash": int(job.on_crash), "source": job.source,
            "sequence": job.sequence, "head": job.head, "ttl": job.ttl, "offset": self.clock.offset, "database_id": database_id,
        }  # fmt: skip
        # Without a transaction around (own connections, single statement) the holder may end between insert and look.
        for _ in range(20):
            session.execute(self._text(ENQUEUE), params)
            if session.changed == 1:
                return Enqueued(job.id, False)
            holder = session.execute(self._text(KEY_HOLDER), {"id": job.id, "target": job.target, "key": job.key})
            if holder:
                found = as_bytes(holder[0][0])
                return Enqueued(found, found != job.id)
            if job.key is None:
                raise DifferentDatabase(different_database())
        raise (
            DifferentDatabase(different_database())
            if database_id
            else DatabaseBusy("the job's key kept changing hands")
        )

    def enqueue_many(self, session: Session, jobs: Sequence[NewJob], database_id: str | None = None) -> list[Enqueued]:
        return [self.enqueue(session, job, database_id) for job in jobs]

    def exists(self, session: Session, job_id: bytes) -> bool:
        return bool(session.execute(self._text(EXISTS), {"id": job_id}))

    def live(self, worker: str) -> Alive:
        return Alive(self.path, worker)

    # -- schedules ---------------------------------------------------------------------------------------------------

    def insert_due(self, session: Session, jobs: Sequence[NewJob]) -> set[bytes]:
        return {job.id for job in jobs if not self.enqueue(session, job).duplicate}

    def move_cursors(self, session: Session, moves: Sequence[Move]) -> int:
        moved = 0
        for move in moves:
            session.execute(self._text(MOVE_CURSOR), {
                "owner": move.owner, "name": move.name, "was": move.was, "last_slot": move.last_slot, "next_at": move.next_at,
                "fired": move.fired, "error": move.error, "offset": self.clock.offset,
            })  # fmt: skip
            moved += session.changed
        return moved

    # -- results -----------------------------------------------------------------------------------------------------

    def store_result(self, session: Session, result: StoredResult) -> None:
        session.execute(self._text(STORE_RESULT), {
            "task_id": result.task_id, "state": result.state, "meta": result.meta, "ttl": result.ttl, "offset": self.clock.offset,
        })  # fmt: skip

    def count_part(
        self, session: Session, group_id: str, task_id: str, part: int, meta: bytes, ttl: int | None
    ) -> ChordCount:
        key = {"group_id": group_id}
        session.execute(self._text(LOCK_CHORD), {**key, "ttl": ttl, "offset": self.clock.offset})
        if session.execute(self._text(CHORD), key)[0][2]:
            return ChordCount(0, None, True)
        session.execute(self._text(WRITE_PART), {**key, "task_id": task_id, "part": part, "meta": meta})
        if session.changed == 1:
            session.execute(self._text(COUNT_PART), {**key, "counted": 1})
        returned, size, _ = session.execute(self._text(CHORD), key)[0]
        return ChordCount(returned, size, False)

    # -- the log of short-lived messages -----------------------------------------------------------------------------

    @property
    def mail_path(self) -> str:
        """Beside the file itself: behind a symbolic link it has other names."""
        return f"{os.path.realpath(self.path)}-mail"

    def mail_session(self) -> SqliteSession:
        """In a side file: what is gone in a minute must not queue for the one write lock, nor wait for the disk."""
        connection = sqlite3.connect(
            self.mail_path, timeout=1, isolation_level=None, check_same_thread=False, cached_statements=64,
            factory=GatedConnection,
        )  # fmt: skip
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=OFF")
            for statement in (MAIL_TABLE, CURSORS_TABLE):
                connection.execute(self._text(statement))
        except BaseException:
            connection.close()
            raise
        return SqliteSession(connection)

    def post(self, session: Session, letter: Letter) -> None:
        session.execute(self._text(POST), {
            "exchange": letter.exchange, "routing_key": letter.routing_key, "head": letter.head, "payload": letter.payload,
            "ttl": letter.ttl, "offset": self.clock.offset,
        })  # fmt: skip

    # -- executors ---------------------------------------------------------------------------------------------------

    def turn(self, session: OwnSession, turn: Turn) -> TurnResult:
        """Settle, renew, claim in one transaction. A worker's loop has timeouts and signals to watch too, so it tries for the write
        lock only for a moment: what was not settled or renewed is asked again in the next turn."""
        assert isinstance(session, SqliteSession)
        session.check()
        patience = min(TURN_PATIENCE, turn.lease / 4_000_000) if turn.lease else 2 * TURN_PATIENCE
        session.begin(time.monotonic() + patience)
        try:
            now = self.now(session)
            result = TurnResult(now=now)
            if turn.settlements or turn.renewals:
                self._spare_own(session, now)
            if turn.settlements:
                result.settled = self.settle(session, turn.settlements)
            if turn.renewals:
                result.renewed = self.renew(session, turn.renewals, turn.lease)
            if turn.claim is not None and turn.claim.limit > 0:
                result.claimed = self._claim(session, turn.claim)
            result.more = [session.execute(text, params) for text, params in turn.looks]
            session.commit()
        except BaseException:
            session.rollback()
            raise
        return result

    def _spare_own(self, session: SqliteSession, now: int) -> None:
        """Before a process that holds a lock of its own settles or renews: no sweep took its claims while it could not write."""
        for worker in own_workers(self.path):
            session.execute(
                self._text(SPARE_OWN), {"worker": worker, "soon": now + SPARED_BEFORE, "until": now + SPARED}
            )

    def _claim(self, session: SqliteSession, claim: ClaimRequest) -> list[ClaimedRow]:
        now = self.now(session)
        until = now + claim.lease
        rows: list[Row] = []
        for queue in claim.queues:
            left = claim.limit - len(rows)
            if left > 0:
                rows += session.execute(self._text(CLAIM_LOOK), {"queue": queue, "limit": left})
        common = {"token": claim.token, "worker": claim.worker, "lease_until": until, "now": now}
        session.execute_all(self._text(CLAIM_TAKE), [common | {"id": row[0]} for row in rows])
        return [
            ClaimedRow(
                id=row[0],
                token=claim.token,
                ready_at=row[15],
                lease_until=until,
                **dict(zip(_LOOK, row[1:15], strict=True)),
            )
            for row in rows
        ]

    def settle(self, session: Session, settlements: Sequence[Settlement]) -> list[Fact]:
        now = self.now(session)
        ends = [self._end(s, now) for s in settlements if s.state.finished]
        if ends and isinstance(session, SqliteSession):
            whole = session.execute_all(self._text(FINISH), ends) == len(ends)
            if whole and len(ends) == len(settlements):
                session.execute_all(self._text(REMOVE), [{k: end[k] for k in ("id", "token", "now")} for end in ends])
                return [Fact.DONE] * len(settlements)
        else:
            for end in ends:
                session.execute(self._text(FINISH), end)
        return [self._fact(session, s, now) for s in settlements]

    def _end(self, s: Settlement, now: int) -> dict[str, Any]:
        return {
            "id": s.id, "token": s.token, "state": int(s.state), "kind": s.kind and s.kind.value, "summary": s.summary, "now": now,
            "keep": self.keep or s.state not in (State.SUCCEEDED, State.ACKED),
        }  # fmt: skip

    def _fact(self, session: Session, s: Settlement, now: int) -> Fact:
        """Removes or puts back one job. FINISH and REMOVE test the same row at the same instant under the same lock, so a row
        that was copied is exactly a row that is removed."""
        same = {"id": s.id, "token": s.token}
        if s.state.finished:
            session.execute(self._text(REMOVE), same | {"now": now})
        else:
            session.execute(self._text(PUT_BACK), same | {
                "state": int(s.state), "kind": s.kind and s.kind.value, "summary": s.summary, "now": now, "delay": s.delay,
                "refund": int(s.refund), "payload": s.payload,
            })  # fmt: skip
        if session.changed == 1:
            return Fact.AGAIN if s.state is State.PENDING else Fact.DONE
        return Fact.ALREADY if session.execute(self._text(ALREADY), same | {"state": int(s.state)}) else Fact.LOST

    def renew(self, session: Session, held: Sequence[Held], lease: int) -> list[Fact]:
        now, facts = self.now(session), []
        for claim in held:
            session.execute(self._text(RENEW), {"id": claim.id, "token": claim.token, "now": now, "until": now + lease})
            facts.append(Fact.RENEWED if session.changed == 1 else Fact.LOST)
        return facts

    def probe(self, session: OwnSession, queues: tuple[str, ...]) -> bool:
        return any(session.execute(self._text(PROBE), {"queue": queue}) for queue in queues)

    def release_unknown(self, session: OwnSession, worker: str, known: Sequence[Held]) -> int:
        assert isinstance(session, SqliteSession)
        session.begin()
        try:
            now, kept = self.now(session), {(held.id, held.token) for held in known}
            mine = session.execute(self._text(RUNNING_OF), {"worker": worker, "now": now})
            lost = [{"id": claim[0], "worker": worker, "now": now} for claim in mine if tuple(claim) not in kept]
            released = session.execute_all(self._text(RELEASE_UNKNOWN), lost) if lost else 0
            session.commit()
        except BaseException:
            session.rollback()
            raise
        return released

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def upkeep(self, session: OwnSession, limit: int, queues: tuple[str, ...], *, expire: bool = True) -> Due:
        """A read first: idle workers must not fight for the write lock. Writes only when something is due; the one read tells about
        leases too, so ``expire`` makes no difference."""
        assert isinstance(session, SqliteSession)
        session.check()
        promoted = again = dead = unknown = 0
        row = session.execute(self._text(ANY_DUE), {"offset": self.clock.offset})[0]
        self._shorten(session, row[0])
        if row[1] or row[2]:
            session.begin(time.monotonic() + UPKEEP_PATIENCE)
            try:
                now = self.now(session)
                session.execute(self._text(PROMOTE), {"now": now, "limit": limit})
                promoted = session.changed
                again, dead, unknown = self._expire(session, now, limit)
                session.commit()
            except BaseException:
                session.rollback()
                raise
            row = session.execute(self._text(ANY_DUE), {"offset": self.clock.offset})[0]
        return Due(row[0], promoted, again, dead, unknown, row[3], row[4])

    def _shorten(self, session: SqliteSession, now: int) -> None:
        if now < session.seen:
            session.shortened = False
        session.seen = now
        if session.shortened:
            return
        if session.execute(self._text(AHEAD), {"offset": self.clock.offset}):
            session.begin(time.monotonic() + UPKEEP_PATIENCE)
            try:
                session.execute(self._text(SHORTEN), {"now": self.now(session)})
                session.commit()
            except BaseException:
                session.rollback()
                raise
        session.shortened = True

    def _expire(self, session: SqliteSession, now: int, limit: int) -> tuple[int, int, int]:
        counts = {State.PENDING: 0, State.DEAD: 0, State.UNKNOWN: 0}
        living: dict[str | None, bool] = {}
        for job_id, following, worker in session.execute(self._text(EXPIRED), {"now": now, "limit": limit}):
            if worker not in living:
                living[worker] = is_alive(self.path, worker)
            if living[worker]:
                session.execute(self._text(SPARE), {"id": job_id, "until": now + SPARED})
                continue
            state = State(following)
            counts[state] += 1
            if state is State.DEAD:
                session.execute(self._text(EXPIRE_DEAD), {"id": job_id, "now": now})
                session.execute(self._text(DELETE_BY_ID), {"id": job_id})
            else:
                session.execute(self._text(EXPIRE_BACK), {"id": job_id, "state": int(state), "now": now})
        return counts[State.PENDING], counts[State.DEAD], counts[State.UNKNOWN]

    def prune(self, session: Session, states: Sequence[State], before: int, limit: int) -> int:
        total = 0
        for state in states:
            session.execute(self._text(PRUNE), {"state": int(state), "before": before, "limit": limit - total})
            total += session.changed
        return total

    # -- by hand -----------------------------------------------------------------------------------------------------

    def cancel(self, session: Session, job_id: bytes) -> Changed:
        now, found, _ = self._found(session, job_id)
        if found not in (State.PENDING, State.RUNNING, State.BLOCKED):
            return Changed(found, False)
        self._move(session, job_id, State.CANCELLED, now)
        return Changed(found, True)

    def retry(self, session: Session, job_id: bytes) -> Changed:
        now, found, row = self._found(session, job_id)
        if found is State.BLOCKED:
            session.execute(self._text(UNBLOCK), {"id": job_id, "now": now})
            return Changed(found, session.changed == 1, None if session.changed == 1 else "key")
        if found not in (State.SUCCEEDED, State.ACKED, State.DEAD, State.CANCELLED):
            return Changed(found, False)
        if not row[2]:
            return Changed(found, False, "payload")
        same = {"id": job_id, "finished_at": row[1]}
        session.execute(self._text(REVIVE), same | {"now": now})
        if session.changed != 1:
            return Changed(found, False, "key")
        session.execute(self._text(FORGET), same)
        return Changed(found, True)

    def resolve(self, session: Session, job_id: bytes, state: State, expected_updated_at: int) -> Changed:
        now, found, row = self._found(session, job_id)
        if found is not State.UNKNOWN:
            return Changed(found, False)
        if row[1] != expected_updated_at:
            return Changed(found, False, "stale")
        self._move(session, job_id, state, now)
        return Changed(found, True)

    def _move(self, session: Session, job_id: bytes, state: State, now: int) -> None:
        session.execute(self._text(MOVE_AS_IT_IS), {"id": job_id, "state": int(state), "now": now})
        session.execute(self._text(DELETE_BY_ID), {"id": job_id})

    def _found(self, session: Session, job_id: bytes) -> tuple[int, State | None, Row]:
        session.execute(self._text(TAKE_LOCK), {"id": job_id})
        now = self.now(session)
        rows = session.execute(self._text(FOUND_UNFINISHED), {"id": job_id}) or session.execute(
            self._text(FOUND_FINISHED), {"id": job_id}
        )
        return (now, State(rows[0][0]), rows[0]) if rows else (now, None, ())


_LOOK = (*(name for name in CLAIMED_COLUMNS if name not in ("id", "lease_until")),)


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; Python 3.10 does not give it, so there the message has to tell."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return int(code) & 0xFF
    texts = {
        "locked": _BUSY, "disk I/O": 10, "is full": 13, "unable to open": _CANNOT_OPEN, "readonly": 8,
        "not a database": _NOT_A_DATABASE,
    }  # fmt: skip
    return next((number for text, number in texts.items() if text in str(error)), 1)


def _is_missing(folder: str) -> bool:
    """Not so when we may only not look."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return not os.path.isdir(folder)


def check_path(url: sqlalchemy.URL) -> str:
    """The file of a sqlite:/// URL. Memory databases are refused: each connection would see its own, and a shared cache
    answers SQLITE_LOCKED at once, whatever the timeout."""
    path = url.database or ""
    if not path or ":memory:" in path or url.query.get("mode") == "memory" or path.startswith("file:"):
        raise ConfigError(
            "the SQLite URL must name a file (sqlite:///app.db, or sqlite:////absolute/path.db); a database in memory or a "
            "file: URI cannot be shared with workers"
        )
    if url.query:
        raise ConfigError(f"the SQLite URL has options that dbqueue does not know: {', '.join(sorted(url.query))}")
    return path


def different_database() -> str:
    return (
        "the connection given to using(...) leads to another database than the queue's, or dbqueue's tables there are not this "
        "queue's; job and business row could not commit together. Use a queue on the same database"
    )
