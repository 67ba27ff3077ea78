"""DBQueue: declared targets, the verbs on their jobs, and the one place where a call finds its transaction.

A call inside ``dbqueue.using(...)`` works on the caller's connection; any other takes a short transaction of its own that has
ended when the call returns. Nothing is opened, read or migrated before the first call that needs the database, so a queue can
be declared at import time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar, cast
from uuid import UUID

from msgspec import structs

from dbqueue import clock, cron, ids, jobs, schedules, views
from dbqueue import settings as config
from dbqueue.claimed import ClaimedJob
from dbqueue.clock import Clock
from dbqueue.database import joined
from dbqueue.database.dialect import Dialect, Session
from dbqueue.database.engine import Database
from dbqueue.database.migrate import Migration
from dbqueue.database.tables import DEFAULT_PRIORITY, ClaimRequest, Enqueued, NewJob, Turn
from dbqueue.errors import ConfigError, ConnectionLost, InvalidArgument, InvalidTarget, NotSupported
from dbqueue.locks import Lock
from dbqueue.outbox import Outbox
from dbqueue.schedules import OWN, Definition, Schedule
from dbqueue.states import State
from dbqueue.targets import (
    MISSING,
    RAW_ATTEMPTS,
    RAW_BACKOFF,
    Declare,
    JobRef,
    P,
    Target,
    _when,
    declare,
    raw_job,
    told,
)
from dbqueue.views import JobRecord, QueueDepth

T = TypeVar("T")


class DBQueue:
    """A durable queue in a database that you have already.

    ``url`` is a SQLAlchemy URL (``postgresql://...``, ``sqlite:///app.db``); without one, DBQUEUE_URL or dbqueue.toml is read at
    the first use. ``options`` are the settings of D17 in seconds: workers, poll, lease, retry_base, retry_max, history,
    keep_payload, schema, prefix, auto_migrate, notify, listen_url. Raises ConfigError naming the option. Thread-safe."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        given = (
            config.JobSettings.from_options(**options)
            if url is None
            else config.JobSettings.from_options(url=url, **options)
        )
        self._settings = given if url is not None else None
        self._options = options
        self._targets: dict[str, Target[Any]] = {}
        self._declared: dict[str, Definition] = {}
        self._lock = threading.RLock()
        self._database: Database | None = None
        if url is not None:
            self._database = open_database(given)

    # -- settings and database ---------------------------------------------------------------------------------------

    @property
    def settings(self) -> config.JobSettings:
        if self._settings is None:
            with self._lock:
                if self._settings is None:
                    self._settings = self._load_settings()
        return self._settings

    @property
    def options(self) -> dict[str, Any]:
        """What the code itself said beside the URL, in seconds."""
        return dict(self._options)

    def adopt(self, loaded: config.JobSettings) -> None:
        """Takes settings that the program has read already, if nothing has decided before: neither a URL in the code nor a use."""
        with self._lock:
            if self._settings is None:
                self._settings = self._merged(loaded)

    def _load_settings(self) -> config.JobSettings:
        return self._merged(config.load(with_jobs=False).jobs)

    def _merged(self, loaded: config.JobSettings) -> config.JobSettings:
        own = config.JobSettings.from_options(**self._options)
        names = {config.OPTIONS[option] for option in self._options}
        loaded = replace(loaded, **{name: getattr(own, name) for name in names})
        if loaded.url is None:
            raise ConfigError(
                "no database is named: give DBQueue(url), or set DBQUEUE_URL, or url under [jobs] in dbqueue.toml"
            )
        return loaded

    @property
    def database(self) -> Database:
        if self._database is None:
            with self._lock:
                if self._database is None:
                    self._database = open_database(self.settings)
        return self._database

    @contextmanager
    def rebound(self, job_settings: config.JobSettings, clock: Clock | None = None) -> Iterator[DBQueue]:
        """Everything goes to another database until the block ends; for the testing kit (D21)."""
        before = self._settings, self._database
        self._settings, self._database = job_settings, open_database(job_settings, clock)
        try:
            yield self
        finally:
            self._database.close()
            self._settings, self._database = before

    def migrate(self) -> list[Migration]:
        """Creates or upgrades dbqueue's tables; returns what was applied. Safe when many processes do it at once (D6). Never inside
        a caller's transaction: raises NotSupported there."""
        if joined.current() is not None:
            raise NotSupported(
                "queue.migrate() inside using(...): your rollback would take the tables away again; call it at start-up"
            )
        return self.database.migrate()

    def close(self) -> None:
        """Closes the pooled connections. Every later call raises Closed."""
        if self._database is not None:
            self._database.close()

    def __repr__(self) -> str:
        where = self._database.label if self._database else "not opened yet"
        return f"<DBQueue {where}: {len(self._targets)} targets>"

    # -- targets -----------------------------------------------------------------------------------------------------

    @property
    def targets(self) -> dict[str, Target[Any]]:
        return dict(self._targets)

    @told("@queue.job", "@queue.job(max_attempts=5, timeout=30) stands above the function", InvalidTarget)
    def job(
        self,
        *,
        max_attempts: int,
        timeout: float,
        queue: str = "default",
        priority: int = DEFAULT_PRIORITY,
        retry: Any = None,
        on_crash: str = "retry",
        name: str | None = None,
    ) -> Declare:
        """Declares a function as a job target: ``@queue.job(max_attempts=5, timeout=30)``.

        ``max_attempts`` (1 to 100) counts the first run; ``timeout`` is in seconds, at most 3600. ``priority`` is 0 to 9, larger
        first. ``retry``: None (exponential, from the settings), a Backoff, a list of delays in seconds, or one number.
        ``on_crash``: what a lost lease does: "retry" (counts as an attempt), "unknown" (held until resolved), "fail" (dead).
        ``name`` defaults to module.function and is stored: renaming it orphans stored jobs. Raises InvalidTarget (D1, D2)."""
        namespace = sys._getframe(2).f_locals  # of the module or function around; between stands ``told``

        def decorate(handler: Callable[..., Any]) -> Target[Any]:
            target = declare(
                handler, writer=self, name=name, namespace=dict(namespace), max_attempts=max_attempts, timeout=timeout, queue=queue,
                priority=priority, retry_policy=retry, on_crash=on_crash,
            )  # fmt: skip
            self.add(target)
            return target

        return cast(Declare, decorate)

    def add(self, target: Target[Any]) -> None:
        """Registers a target that a door has made, for the workers of this queue. Raises InvalidTarget if its name is taken."""
        if target.name in self._targets:
            raise InvalidTarget(f"target {target.name!r} is declared twice; give one of them another name=")
        self._targets[target.name] = target

    # -- enqueueing --------------------------------------------------------------------------------------------------

    def write(self, new: Sequence[NewJob]) -> list[JobRef]:
        """Writes jobs that are checked already: joined inside ``using``, else in a transaction of its own."""
        block = joined.current()
        if block is None:
            return [_ref(e) for e in self._write_own(new)]
        database = self.database
        block.check(database)
        if block.buffer is not None:
            block.buffer.add(database, new)
            return [JobRef(ids.as_uuid(job.id), None if job.key else False) for job in new]
        with joined.failures(database):
            return [_ref(e) for e in _enqueue(database.dialect, block.session(database), new, database.database_id)]

    def _write_own(self, new: Sequence[NewJob]) -> list[Enqueued]:
        database = self.database
        database.ready()

        def verb(session: Session) -> list[Enqueued]:
            return _enqueue(database.dialect, session, new, None)

        # A single statement on an autocommit connection is one round trip; SQLite needs its lock taken in our own way.
        run = database.single if len(new) == 1 and database.dialect.name != "sqlite" else database.run
        try:
            return run(verb)
        except ConnectionLost:
            # Perhaps committed, and the answer was lost: the ids are ours, so we can look instead of writing twice.
            written = database.read(lambda s: [database.dialect.exists(s, job.id) for job in new])
            if not any(written):
                return run(verb)
            missing = [job for job, found in zip(new, written, strict=True) if not found]
            rest = iter(run(lambda s: _enqueue(database.dialect, s, missing, None)) if missing else ())
            return [Enqueued(job.id, False) if found else next(rest) for job, found in zip(new, written, strict=True)]

    @told("send()", "queue.send(name, payload, key=..., delay=...)")
    def send(
        self, name: str, payload: Any, *, key: str | None = None, run_at: datetime | None = None, delay: float | None = None,
        priority: int = DEFAULT_PRIORITY, max_attempts: int = RAW_ATTEMPTS,
    ) -> JobRef:  # fmt: skip
        """Writes a job to a raw queue: no target, any JSON value as payload, claimed with ``queue.claim(name, ...)`` (A8). Joins
        like every enqueue. At most one unfinished job of the queue has ``key``."""
        at, wait = _when(run_at, delay)
        return self.write([raw_job(name, payload, key, priority, max_attempts, at, wait)])[0]

    # -- schedules ---------------------------------------------------------------------------------------------------

    @told("schedule()", 'queue.schedule("nightly", "0 3 * * *", target, Record(...), timezone="Europe/Berlin")')
    def schedule(
        self, name: str, spec: str, target: Target[P] | str, payload: P | Any = MISSING, *, timezone: str = "UTC",
        catch_up: str = "all", max_age: float | None = None, key: str | None = None, priority: int | None = None,
        max_attempts: int | None = None,
    ) -> Schedule:  # fmt: skip
        """Writes the schedule under this name, or replaces the one that has it, and returns what is stored; a beat fires it.

        ``spec``: cron's five fields in the IANA ``timezone``, or ``@every <n><s|m|h|d>`` (see ``dbqueue.cron``). ``target``: a
        target with its payload, or the name of a raw queue with any JSON value. ``catch_up`` says what becomes of slots that no
        beat was there to fire: "all" fires them, "latest" only the last one, "skip" none that is over a minute late; none fires
        a slot older than ``max_age`` seconds. ``key``: a slot adds nothing while an unfinished job has it. A new schedule, and
        one whose spec changes, begins with the first slot after the database's now. Joins like an enqueue. Raises InvalidSpec, InvalidName,
        ReservedName, InvalidArgument, InvalidPayload, all before the database is asked (A1, A5, D15)."""
        new = _definition(name, spec, target, payload, timezone, catch_up, max_age, key, priority, max_attempts)
        return schedules.shown(self._in_transaction(lambda dialect, session: schedules.put(dialect, session, new)))

    @told("periodic()", 'queue.periodic("nightly", "0 3 * * *", target, Record(...))')
    def periodic(
        self, name: str, spec: str, target: Target[P] | str, payload: P | Any = MISSING, *, timezone: str = "UTC",
        catch_up: str = "all", max_age: float | None = None, key: str | None = None, priority: int | None = None,
        max_attempts: int | None = None,
    ) -> None:  # fmt: skip
        """Declares a schedule in code; the arguments are those of ``schedule``. Nothing is written before ``dbqueue beat -A`` or
        ``start_schedules`` starts with this code; and that refuses to start if another version of the code owns the schedule."""
        new = _definition(
            name, spec, target, payload, timezone, catch_up, max_age, key, priority, max_attempts, static=True
        )
        if new.name in self._declared:
            raise InvalidArgument(f"schedule {name!r} is declared twice; give one of them another name")
        self._declared[new.name] = new

    def start_schedules(self) -> list[str]:
        """Writes what ``periodic`` declared, where it is missing; returns the names of declared schedules in the database that this
        code does not have. Raises ScheduleConflict, and writes nothing, if one of them is another version's (D16)."""
        declared = list(self._declared.values())
        return self._in_transaction(lambda dialect, session: schedules.start(dialect, session, declared))

    def adopt_schedules(self) -> list[Schedule]:
        """Puts this code's declared schedules in the place of another version's; their cursors stay where the spec is the same."""
        declared = schedules.in_order(list(self._declared.values()))
        adopted = self._in_transaction(lambda dialect, session: [schedules.put(dialect, session, d) for d in declared])
        return [schedules.shown(entry) for entry in adopted]

    def unschedule(self, name: str, owner: str = OWN) -> bool:
        """Removes a schedule; False: there is none (A2). Its jobs stay. Joins like an enqueue."""
        _check_schedule(name, owner)
        return self._in_transaction(lambda dialect, session: schedules.remove(dialect, session, name, owner))

    def schedules(self) -> list[Schedule]:
        """All schedules, the entries of Celery apps included."""
        return [
            schedules.shown(entry) for entry in self._read(lambda dialect, session: schedules.find(dialect, session))
        ]

    def get_schedule(self, name: str, owner: str = OWN) -> Schedule | None:
        _check_schedule(name, owner)
        entry = self._read(lambda dialect, session: schedules.get(dialect, session, name, owner))
        return None if entry is None else schedules.shown(entry)

    def pause_schedule(self, name: str, owner: str = OWN) -> None:
        """Its slots pass by without a job, until it is resumed. Raises ScheduleNotFound."""
        _check_schedule(name, owner)
        self._in_transaction(lambda dialect, session: schedules.pause(dialect, session, name, owner))

    def resume_schedule(self, name: str, owner: str = OWN) -> None:
        """Fires again, beginning with the first slot after the database's now. Raises ScheduleNotFound."""
        _check_schedule(name, owner)
        self._in_transaction(lambda dialect, session: schedules.resume(dialect, session, name, owner))

    def reset_schedule(self, name: str, owner: str = OWN) -> None:
        """Begins anew at the database's now, even where the cursor lies behind it since the clock went back. Raises ScheduleNotFound."""
        _check_schedule(name, owner)
        self._in_transaction(lambda dialect, session: schedules.reset(dialect, session, name, owner))

    def run_schedule(self, name: str) -> JobRef:
        """Enqueues a job of the schedule now, beside its slots. Joins like an enqueue. Raises ScheduleNotFound."""
        _check_schedule(name, OWN)
        new = self._read(lambda dialect, session: schedules.run_now(dialect, session, name))
        return self.write([new])[0]

    # -- raw claims --------------------------------------------------------------------------------------------------

    def claim(self, name: str, worker_id: str, lease: float = 60.0) -> ClaimedJob | None:
        """Claims the best due job of a queue for ``lease`` seconds (0.1 to 7200), or returns None (A8).

        Commits before it returns: the attempt counts from here. If the process dies, the job is claimable again when the lease
        has ended by the database's clock. Whoever holds it calls ``heartbeat`` in time and ends with ``ack`` or ``retry``."""
        config.check_name("queue", name)
        config.check_name("worker", worker_id)
        return self.take(name, worker_id, lease_microseconds(lease), RAW_BACKOFF)

    def take(self, queue: str, worker: str, lease: int, backoff: float) -> ClaimedJob | None:
        """Claims from a queue whose name is checked already."""
        database = self.database
        database.ready()
        request = ClaimRequest((queue,), 1, worker, ids.new_token(), lease)
        with database.session() as session:
            rows = database.dialect.turn(session, Turn(claim=request)).claimed
            if not rows:
                due = database.dialect.upkeep(session, 100, (queue,))
                if due.promoted or due.again:
                    rows = database.dialect.turn(session, Turn(claim=request)).claimed
        return ClaimedJob(database, rows[0], lease, backoff) if rows else None

    # -- outboxes ----------------------------------------------------------------------------------------------------

    def outbox(self, name: str) -> Outbox:
        """The outbox of this name (A6), up to 185 characters: ``outbox.enqueue(payload)`` joins your transaction, and
        ``outbox.run_once`` or ``dbqueue worker --outbox`` delivers. Raises InvalidName, ReservedName; nothing is asked of the database."""
        return Outbox(self, name)

    # -- locks -------------------------------------------------------------------------------------------------------

    def lock(self, name: str, ttl: float = 30.0) -> Lock:
        """A lock of the database (A7), not taken yet: ``with queue.lock("import", ttl=60): ...``, or ``acquire``, ``renew`` and
        ``release``. ``ttl``: seconds (0.1 to 86,400) after which it ends unless it was renewed, by the database's clock. Raises
        InvalidName, ReservedName, InvalidArgument; nothing is asked of the database."""
        return Lock(self.database, config.check_name("lock", name), ttl)

    # -- one job by hand ---------------------------------------------------------------------------------------------

    def get_job(self, job_id: UUID, *, with_payload: bool = False) -> JobRecord | None:
        """The job's record, finished or not; None when there is none (any more). Inside ``using`` it sees the caller's own writes."""
        raw = id_bytes(job_id)
        return self._read(lambda dialect, session: views.get(dialect, session, raw, with_payload=with_payload))

    def jobs(
        self, *, state: str | None = None, queue: str | None = None, target: str | None = None, key: str | None = None,
        task_id: str | None = None, limit: int = 100, offset: int = 0,
    ) -> list[JobRecord]:  # fmt: skip
        """Jobs that match everything given, those changed last first."""
        states = () if state is None else (parse_state(state),)
        return self._read(
            lambda d, s: views.find(
                d, s, states=states, queue=queue, target=target, key=key, task_id=task_id, limit=limit, offset=offset
            )
        )

    def queues(self, queue: str | None = None) -> list[QueueDepth]:
        """Every queue with unfinished jobs: how many in which state, and the age in seconds of its oldest claimable one."""
        return self._read(lambda dialect, session: views.depths(dialect, session, queue))

    def counts(self, queue: str | None = None) -> dict[str, int]:
        """How many jobs there are in each state, the kept history included."""
        return self._read(lambda dialect, session: views.counts(dialect, session, queue))

    def cancel(self, job_id: UUID) -> str:
        """Ends a pending, blocked or running job as cancelled; returns the state that it had. A running handler sees
        ``current_job().cancelled``, and whatever it returns is not recorded. Raises JobNotFound, IllegalMove."""
        raw = id_bytes(job_id)
        return self._change(lambda dialect, session: jobs.cancel(dialect, session, raw))

    def retry(self, job_id: UUID) -> str:
        """Makes a blocked, dead, cancelled or acked job pending again, due now; returns the state that it had. Raises
        JobNotFound, IllegalMove, KeyTaken."""
        raw = id_bytes(job_id)
        return self._change(lambda dialect, session: jobs.retry(dialect, session, raw))

    def resolve(self, job_id: UUID, outcome: str, expected_updated_at: datetime) -> str:
        """Decides about an unknown job: "succeeded" or "discarded", if it still is as read (H7). Raises JobNotFound, IllegalMove,
        StaleUpdate."""
        raw, state = id_bytes(job_id), parse_state(outcome)
        if not isinstance(expected_updated_at, datetime) or expected_updated_at.tzinfo is None:
            raise InvalidArgument(
                "expected_updated_at must be the aware datetime that the job's record says (record.updated_at)"
            )
        instant = clock.to_instant(expected_updated_at)
        return self._change(lambda dialect, session: jobs.resolve(dialect, session, raw, state, instant))

    def purge(self, states: Sequence[str], older_than: float = 0.0, limit: int = 1_000) -> int:
        """Deletes up to ``limit`` finished jobs of these states that ended more than ``older_than`` seconds ago; returns how many.
        Call again until it returns 0: each call is one short transaction."""
        ended = [parse_state(state) for state in states]
        if not all(state.finished for state in ended):
            raise InvalidArgument(
                "only finished jobs are purged (succeeded, acked, dead, cancelled, discarded); cancel the others first"
            )
        database = self.database
        database.ready()

        def verb(session: Session) -> int:
            before = database.dialect.now(session) - round(older_than * clock.SECOND)
            return database.dialect.prune(session, ended, before, limit)

        return database.run(verb)

    def _read(self, verb: Callable[[Dialect, Session], T]) -> T:
        database, block = self.database, joined.current()
        if block is not None and block.buffer is None and not block.closed:
            block.check(database)
            with joined.failures(database):
                return verb(database.dialect, block.session(database))
        database.ready()
        return database.read(lambda session: verb(database.dialect, session))

    def _change(self, verb: Callable[[Dialect, Session], State]) -> str:
        return self._in_transaction(verb).label

    def _in_transaction(self, verb: Callable[[Dialect, Session], T]) -> T:
        """Joined inside ``using``, else in a transaction of its own."""
        database, block = self.database, joined.current()
        if block is None:
            database.ready()
            return database.run(lambda session: verb(database.dialect, session))
        block.check(database)
        if block.buffer is not None:
            raise NotSupported(
                "only an enqueue can wait for an async session's commit; make this call outside of using(...)"
            )
        with joined.failures(database):
            return verb(database.dialect, block.session(database))


def open_database(job_settings: config.JobSettings, clock: Clock | None = None) -> Database:
    assert job_settings.url is not None
    return Database(
        job_settings.url,
        schema=job_settings.schema,
        prefix=job_settings.prefix,
        pool_size=job_settings.workers + 1,  # D18: handlers share this pool
        auto_migrate=job_settings.auto_migrate,
        notify=job_settings.notify,
        listen_url=job_settings.listen_url,
        keep_payload=job_settings.keep_payload,
        clock=clock,
    )


def _check_schedule(name: object, owner: object) -> None:
    """Celery gives the entries of its apps whatever names it likes."""
    if owner == OWN:
        config.check_name("schedule", name)
    elif not isinstance(owner, str) or not isinstance(name, str):
        raise InvalidArgument("owner is the name of a Celery app, a str, and name that of one of its entries")


def id_bytes(job_id: object) -> bytes:
    if not isinstance(job_id, UUID):
        raise InvalidArgument(f"a job's id is a uuid.UUID; got {type(job_id).__name__} (uuid.UUID(text) makes one)")
    return job_id.bytes


def parse_state(name: object) -> State:
    known = {state.label: state for state in State}
    if not isinstance(name, str) or name not in known:
        raise InvalidArgument(f"a state is one of {', '.join(known)}; got {config.describe(name)}")
    return known[name]


def lease_microseconds(lease: object) -> int:
    if isinstance(lease, bool) or not isinstance(lease, (int, float)) or not 0.1 <= lease <= 7_200:
        raise InvalidArgument(f"lease must be a number of seconds from 0.1 to 7200; got {config.describe(lease)}")
    return round(lease * clock.SECOND)


def _definition(
    name: str, spec: str, target: object, payload: Any, timezone: str, catch_up: str, max_age: float | None, key: str | None,
    priority: int | None, max_attempts: int | None, *, static: bool = False,
) -> Definition:  # fmt: skip
    """A declared schedule, checked whole."""
    config.check_name("schedule", name)
    cron.parse(spec, timezone)
    age = schedules.check_catch_up(name, catch_up, max_age)
    if isinstance(target, Target):
        job = target.new_job(payload, key=key, priority=priority)
        if max_attempts is not None:
            config.check_target_policy(target.name, max_attempts=max_attempts, timeout=1, priority=0)
            job = structs.replace(job, max_attempts=max_attempts)
    elif isinstance(target, str):
        attempts = RAW_ATTEMPTS if max_attempts is None else max_attempts
        wanted = DEFAULT_PRIORITY if priority is None else priority
        job = raw_job(target, None if payload is MISSING else payload, key, wanted, attempts)
    else:
        raise InvalidArgument(
            f"schedule {name!r}: the target is a declared target or the name of a raw queue; got {config.describe(target)}"
        )
    return Definition(
        name=name, spec=spec, timezone=timezone, catch_up=catch_up, max_age=age, static=static, target=job.target, queue=job.queue,
        payload=job.payload, fingerprint=job.fingerprint, key=job.key, priority=job.priority, max_attempts=job.max_attempts,
        timeout_ms=job.timeout_ms, on_crash=int(job.on_crash),
    )  # fmt: skip


def _enqueue(dialect: Dialect, session: Session, new: Sequence[NewJob], database_id: str | None) -> list[Enqueued]:
    if len(new) == 1:
        return [dialect.enqueue(session, new[0], database_id)]
    return dialect.enqueue_many(session, new, database_id)


def _ref(enqueued: Enqueued) -> JobRef:
    return JobRef(ids.as_uuid(enqueued.id), enqueued.duplicate)
