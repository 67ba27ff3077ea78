"""dbqueue: durable jobs in the database that you already have (distribution ``celery-dbqueue``).

The public names; everything else is internal and may change.
"""

from dbqueue.claimed import ClaimedJob
from dbqueue.database.joined import using
from dbqueue.errors import (
    Bury,
    ClaimBusy,
    Closed,
    Code,
    ConfigError,
    ConnectionLost,
    DatabaseBusy,
    DatabaseError,
    DifferentDatabase,
    EnqueueFailed,
    IllegalMove,
    InvalidArgument,
    InvalidName,
    InvalidPayload,
    InvalidTarget,
    JobError,
    JobNotFound,
    KeyTaken,
    LostClaim,
    NotInTransaction,
    NotSupported,
    QueueError,
    ReservedName,
    RetryLater,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    StaleUpdate,
    TargetIsNotAValue,
    TransactionClosed,
    TransactionTooOld,
    UnknownTarget,
    WouldDeadlock,
)
from dbqueue.payload import CorruptPayload, ModelId
from dbqueue.queue import DBQueue
from dbqueue.retry import Backoff, Delays
from dbqueue.runtime.context import JobContext, Port, current_job
from dbqueue.targets import JobRef, Target
from dbqueue.views import JobRecord, QueueDepth

__version__ = "0.1.0"

__all__ = [
    "Backoff",
    "Bury",
    "ClaimBusy",
    "ClaimedJob",
    "Closed",
    "Code",
    "ConfigError",
    "ConnectionLost",
    "CorruptPayload",
    "DBQueue",
    "DatabaseBusy",
    "DatabaseError",
    "Delays",
    "DifferentDatabase",
    "EnqueueFailed",
    "IllegalMove",
    "InvalidArgument",
    "InvalidName",
    "InvalidPayload",
    "InvalidTarget",
    "JobContext",
    "JobError",
    "JobNotFound",
    "JobRecord",
    "JobRef",
    "KeyTaken",
    "LostClaim",
    "ModelId",
    "NotInTransaction",
    "NotSupported",
    "Port",
    "QueueDepth",
    "QueueError",
    "ReservedName",
    "RetryLater",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "StaleUpdate",
    "Target",
    "TargetIsNotAValue",
    "TransactionClosed",
    "TransactionTooOld",
    "UnknownTarget",
    "WouldDeadlock",
    "current_job",
    "using",
]
