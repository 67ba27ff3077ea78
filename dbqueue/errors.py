"""Every error that dbqueue raises, in one small tree.

Each class has a stable ``code`` (H17): programs compare codes, people read messages. A message names the field, the
kind of the value and the remedy; it never contains a payload, a secret or the text of a foreign exception (D10).
The docstring of a class says when it is raised and what to do next.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Code(str, Enum):
    """The stable codes. A code is never renamed or reused; new failure kinds get new codes."""

    QUEUE_ERROR = "queue_error"
    # declaration, settings, arguments
    CONFIG_ERROR = "config_error"
    FOREIGN_DISTRIBUTION = "foreign_distribution"
    INVALID_TARGET = "invalid_target"
    TARGET_IS_NOT_A_VALUE = "target_is_not_a_value"
    INVALID_PAYLOAD = "invalid_payload"
    INVALID_ARGUMENT = "invalid_argument"
    INVALID_NAME = "invalid_name"
    RESERVED_NAME = "reserved_name"
    INVALID_SPEC = "invalid_spec"
    INVALID_CRON = "invalid_cron"
    UNKNOWN_TARGET = "unknown_target"
    NOT_SUPPORTED = "not_supported"
    # enqueueing, transactions
    ENQUEUE_FAILED = "enqueue_failed"
    NOT_IN_TRANSACTION = "not_in_transaction"
    TRANSACTION_CLOSED = "transaction_closed"
    TRANSACTION_TOO_OLD = "transaction_too_old"
    WOULD_DEADLOCK = "would_deadlock"
    DIFFERENT_DATABASE = "different_database"
    UNROUTABLE = "unroutable"
    # schema
    SCHEMA_MISSING = "schema_missing"
    SCHEMA_OUTDATED = "schema_outdated"
    SCHEMA_TOO_NEW = "schema_too_new"
    # jobs
    JOB_NOT_FOUND = "job_not_found"
    ILLEGAL_MOVE = "illegal_move"
    KEY_TAKEN = "key_taken"
    STALE_UPDATE = "stale_update"
    LOST_CLAIM = "lost_claim"
    CLAIM_BUSY = "claim_busy"
    # the database itself
    CONNECTION_LOST = "connection_lost"
    DATABASE_BUSY = "database_busy"
    DATABASE_ERROR = "database_error"
    CLOSED = "closed"
    # a stored payload that cannot be run
    CORRUPT_PAYLOAD = "corrupt_payload"
    SCHEMA_MISMATCH = "schema_mismatch"
    INVALID_POLICY = "invalid_policy"
    # schedules, locks, outbox
    LOCK_TAKEN = "lock_taken"
    LOCK_LOST = "lock_lost"
    LEADERSHIP_LOST = "leadership_lost"
    SCHEDULE_NOT_FOUND = "schedule_not_found"
    SCHEDULE_CONFLICT = "schedule_conflict"
    # task definitions stored in the database and their executions (H)
    NOT_INITIALIZED = "not_initialized"
    INIT_FAILED = "init_failed"
    TASK_NOT_FOUND = "task_not_found"
    TASK_EXISTS = "task_exists"
    EXECUTION_FAILED = "execution_failed"
    CODE_FAILED = "code_failed"
    HTTP_FAILED = "http_failed"
    SAVE_FAILED = "save_failed"
    ALREADY_RUNNING = "already_running"
    NOT_RUNNING = "not_running"
    COMPILE_FAILED = "compile_failed"
    HOOK_FAILED = "hook_failed"
    LOG_PERSIST_FAILED = "log_persist_failed"

    def __str__(self) -> str:
        return self.value


class QueueError(Exception):
    """The root of the tree: ``except dbqueue.QueueError`` catches everything that dbqueue raises on purpose."""

    code: ClassVar[Code] = Code.QUEUE_ERROR


# -- declaration, settings and arguments: raised before anything is written or started ---------------------------------


class ConfigError(QueueError):
    """A setting is unknown, of the wrong type or out of bounds. The message names the field, the value's kind and the
    remedy; nothing was started (D17, D20)."""

    code = Code.CONFIG_ERROR


class ForeignDistribution(ConfigError):
    """The module ``dbqueue`` on the path belongs to another distribution than ``celery-dbqueue``. Uninstall one."""

    code = Code.FOREIGN_DISTRIBUTION


class InvalidTarget(QueueError):
    """A ``@queue.job`` declaration breaks D1 or D2. The message names the target and the parameter or field path."""

    code = Code.INVALID_TARGET


class TargetIsNotAValue(QueueError, TypeError):
    """A job target was called, pickled, copied into a payload or grouped (D3). Call ``target.enqueue(...)`` instead."""

    code = Code.TARGET_IS_NOT_A_VALUE


class InvalidPayload(QueueError, ValueError):
    """The payload does not have the declared type. The message names target, field path and the kind of the value."""

    code = Code.INVALID_PAYLOAD


class InvalidArgument(QueueError, ValueError):
    """An argument of a call (key, run_at, delay, limit ...) has the wrong type or is out of bounds."""

    code = Code.INVALID_ARGUMENT


class InvalidName(InvalidArgument):
    """A queue, schedule, lock or target name breaks the namespace rule (A1)."""

    code = Code.INVALID_NAME


class ReservedName(InvalidName):
    """The name starts with the prefix that dbqueue keeps for itself (A1)."""

    code = Code.RESERVED_NAME


class InvalidSpec(InvalidArgument):
    """The spec of a schedule breaks the grammar (D15, A1), could never be due, or its timezone is not known. The message names
    the field and the remedy; the database was not asked."""

    code = Code.INVALID_SPEC


class UnknownTarget(QueueError):
    """No target of that name is declared in this program."""

    code = Code.UNKNOWN_TARGET


class NotSupported(QueueError):
    """The call asks for something that dbqueue cannot keep durable; the message names it and the alternative."""

    code = Code.NOT_SUPPORTED


# -- enqueueing in somebody's transaction ------------------------------------------------------------------------------


class EnqueueFailed(QueueError):
    """The database refused the write. Inside ``using(...)`` the caller's transaction is to be rolled back; dbqueue did
    not retry and did not use another connection (D5). ``__cause__`` is the driver's error."""

    code = Code.ENQUEUE_FAILED


class NotInTransaction(EnqueueFailed):
    """``using(...)`` got a connection in autocommit mode. Begin a transaction first, or enqueue outside of the block."""

    code = Code.NOT_IN_TRANSACTION


class TransactionClosed(EnqueueFailed):
    """The ``using(...)`` block that this task, thread or coroutine inherited has ended."""

    code = Code.TRANSACTION_CLOSED


class TransactionTooOld(EnqueueFailed):
    """SQLite: the transaction read before another connection committed and can no longer write. Roll back and begin
    again with BEGIN IMMEDIATE (Django: ``transaction_mode``; SQLAlchemy: a ``begin`` event)."""

    code = Code.TRANSACTION_TOO_OLD


class WouldDeadlock(EnqueueFailed):
    """SQLite: this thread's own open transaction holds the write lock that dbqueue's connection would wait for.
    Do the call inside ``using(...)`` or after the commit."""

    code = Code.WOULD_DEADLOCK


class DifferentDatabase(EnqueueFailed):
    """The caller's connection leads to another database than the queue's (told by its random ``database_id``), so job
    and business row could not commit together. Use a queue on the same database."""

    code = Code.DIFFERENT_DATABASE


class Unroutable(EnqueueFailed):
    """A message was published in the caller's transaction to an exchange that no queue is bound to: it would be lost although
    the transaction commits. Declare or bind the queue first."""

    code = Code.UNROUTABLE


# -- schema ------------------------------------------------------------------------------------------------------------


class SchemaMissing(QueueError):
    """dbqueue's tables are not there. Run ``dbqueue migrate`` (or ``queue.migrate()`` when the program starts)."""

    code = Code.SCHEMA_MISSING


class SchemaOutdated(QueueError):
    """dbqueue's tables are older than this version needs. Run ``dbqueue migrate``."""

    code = Code.SCHEMA_OUTDATED


class SchemaTooNew(QueueError):
    """dbqueue's tables were made by a newer version. Upgrade celery-dbqueue; nothing was read or written."""

    code = Code.SCHEMA_TOO_NEW


# -- jobs --------------------------------------------------------------------------------------------------------------


class JobNotFound(QueueError, LookupError):
    """No job with this id exists, or its history was pruned."""

    code = Code.JOB_NOT_FOUND


class IllegalMove(QueueError):
    """The job's state does not allow the verb (see the MOVES table); nothing changed."""

    code = Code.ILLEGAL_MOVE


class KeyTaken(IllegalMove):
    """Another unfinished job of the same target has this key (D8); nothing changed."""

    code = Code.KEY_TAKEN


class StaleUpdate(IllegalMove):
    """The job changed since ``expected_updated_at`` was read (H7); read it again. Nothing changed."""

    code = Code.STALE_UPDATE


class LostClaim(QueueError):
    """The claim's lease ended or the job was taken over, cancelled or finished elsewhere (D13). Stop working on it:
    nothing changed, and whoever owns the job now decides about it."""

    code = Code.LOST_CLAIM


class ClaimBusy(QueueError):
    """Another transaction holds the job's row lock at this moment (D13). The claim is not lost: ask again."""

    code = Code.CLAIM_BUSY


# -- schedules ---------------------------------------------------------------------------------------------------------


class ScheduleNotFound(QueueError, LookupError):
    """No schedule has this name. ``dbqueue schedules list`` shows those that there are."""

    code = Code.SCHEDULE_NOT_FOUND


class ScheduleConflict(QueueError):
    """The code declares a schedule whose stored row another version of the code wrote (D16); nothing was started. ``dbqueue schedules
    adopt`` puts this version's in its place."""

    code = Code.SCHEDULE_CONFLICT


# -- locks -------------------------------------------------------------------------------------------------------------


class LockTaken(QueueError):
    """``with queue.lock(name)``: somebody else holds the lock (A7). Try again later; nothing was done."""

    code = Code.LOCK_TAKEN


class LockLost(QueueError):
    """The lock ended, by the database's clock, before what it protected did (A7): somebody else may have held it meanwhile. Renew
    it in time, or give it a longer ``ttl``."""

    code = Code.LOCK_LOST


class LeadershipLost(LockLost):
    """Another runner fires the schedules now (A3). This one fired nothing after its leadership had ended: start it again, or leave
    the work to the other."""

    code = Code.LEADERSHIP_LOST


# -- the database itself -----------------------------------------------------------------------------------------------


class DatabaseError(QueueError):
    """The database refused a statement for a reason that a retry will not cure. ``__cause__`` is the driver's error."""

    code = Code.DATABASE_ERROR


class ConnectionLost(DatabaseError):
    """The connection ended, could not be made, or leads to a server that cannot write. A new one may succeed."""

    code = Code.CONNECTION_LOST


class DatabaseBusy(DatabaseError):
    """A lock, deadlock or serialization conflict outlived dbqueue's own retries. The connection is still good."""

    code = Code.DATABASE_BUSY


class Closed(QueueError):
    """The queue was closed; make a new ``DBQueue``."""

    code = Code.CLOSED


# -- raised by handlers, to say how their job goes on --------------------------------------------------------------------

SUMMARY_LIMIT = 200
"""Characters of an error summary that a job row keeps (D10)."""


class JobError(Exception):
    """Raised by a handler: the attempt failed, and this message is safe to store with the job. Of every other exception only
    the class is stored, since its text may quote data or secrets (D10). Subclass it to opt your own errors in."""


class RetryLater(JobError):
    """Raised by a handler: the attempt failed; try again after ``delay`` seconds (None: the target's own backoff)."""

    def __init__(self, message: str = "", *, delay: float | None = None) -> None:
        super().__init__(message)
        self.delay = delay


class GoOn(RetryLater):
    """Raised by the handlers of a door (``celery_bridge``): this run did its part, and the same job goes on after ``delay`` seconds
    with ``payload`` in the place of its own. No failure, so it takes nothing from the attempts that the job has left."""

    def __init__(self, message: str, payload: bytes, *, delay: float) -> None:
        super().__init__(message, delay=delay)
        self.payload = payload


class Bury(JobError):
    """Raised by a handler: the job is dead now, whatever attempts are left."""


def summary_of(error: BaseException) -> str:
    """The bounded, safe summary of an error: its class; the message only where the class opts in."""
    name = type(error).__name__
    text = f"{name}: {error}" if isinstance(error, JobError) and str(error) else name
    return clean_summary(text)


def clean_summary(text: str) -> str:
    """At most SUMMARY_LIMIT characters that every database can store."""
    cleaned = "".join(c if c.isprintable() else " " for c in text[: SUMMARY_LIMIT + 1])
    return cleaned if len(cleaned) <= SUMMARY_LIMIT else cleaned[: SUMMARY_LIMIT - 1] + "\u2026"
