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

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, TypeVar

import sqlalchemy
from sqlalchemy.dialects.postgresql import psycopg as sqlalchemy_psycopg

from dbqueue.clock import POSTGRES_NOW, Clock
from dbqueue.database.dialect import OwnSession, Row, Session
from dbqueue.database.tables import (
    CLAIMED_COLUMNS,
    FINISHED_COLUMNS,
    JOB_COLUMNS,
    Changed,
    ClaimedRow,
    ClaimRequest,
    Due,
    Enqueued,
    Fact,
    Held,
    Names,
    NewJob,
    Settlement,
    Turn,
    TurnResult,
)
from dbqueue.errors import ConfigError, ConnectionLost, DatabaseBusy, DatabaseError, KeyTaken, QueueError, SchemaMissing
from dbqueue.ids import ZERO, as_bytes
from dbqueue.states import State, allowed

T = TypeVar("T")

NOW = f"({POSTGRES_NOW} + %(offset)s::bigint)"

# The gate (DESIGN: waking up). A sleeper holds a shared advisory lock on its queue's key. Whoever makes a job claimable tries
# the exclusive one: refused means that somebody sleeps, and only then a NOTIFY is sent, since its commit takes a lock over the
# whole cluster. It stands in a RETURNING or above an aggregate, so it runs when the transaction already has its id: a sleeper
# that announced itself later waits for that id to end before it trusts its last look.
GATE_KEY = "hashtextextended(%(salt)s::text || {queue}, 0)"
GATE = "CASE WHEN pg_try_advisory_lock(" + GATE_KEY + ") THEN NOT pg_advisory_unlock(" + GATE_KEY + ") ELSE true END"
RING = "pg_notify('dbqueue_' || to_hex(" + GATE_KEY + "), '')"

_NEW_COLUMNS = (
    "id, task_id, target, fingerprint, payload, key, queue, priority, state, run_at, ready_at, max_attempts, timeout_ms, "
    "on_crash, source, sequence, created_at, updated_at"
)

# The id may be there already: the first try of an insert whose answer was lost commits late, while the second one is under way.
ENQUEUE = f"""
WITH t AS MATERIALIZED (SELECT {NOW} AS now),
ins AS (INSERT INTO {{jobs}} ({_NEW_COLUMNS})
  SELECT %(id)s::uuid, %(task_id)s::text, %(target)s::text, %(fingerprint)s::bytea, %(payload)s::bytea, %(key)s::text, %(queue)s::text,
    %(priority)s::smallint, 0, COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint),
    CASE WHEN COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint) <= t.now THEN t.now END,
    %(max_attempts)s::integer, %(timeout_ms)s::integer, %(on_crash)s::smallint, %(source)s::text, %(sequence)s::bigint, t.now, t.now
  FROM t
  ON CONFLICT DO NOTHING
  RETURNING id, CASE WHEN run_at < created_at + %(soon)s::bigint THEN {GATE} ELSE false END AS sleeper)
SELECT id, false AS duplicate, CASE WHEN sleeper THEN {RING} END IS NOT NULL AS rang FROM ins
UNION ALL
SELECT id, false, false FROM {{jobs}} WHERE id = %(id)s::uuid AND NOT EXISTS (SELECT 1 FROM ins)
UNION ALL
SELECT id, true, false FROM {{jobs}}
WHERE target = %(target)s::text AND key = %(key)s::text AND key IS NOT NULL AND state IN (0, 1, 3) AND NOT EXISTS (SELECT 1 FROM ins)
""".replace("{queue}", "%(queue)s::text")

# Sorted by key, so that two callers with the same keys in opposite orders do not deadlock.
ENQUEUE_MANY = f"""
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::uuid[], %(keys)s::text[], %(payloads)s::bytea[]) WITH ORDINALITY AS a(id, key, payload, n)),
t AS MATERIALIZED (SELECT {NOW} AS now),
ins AS (INSERT INTO {{jobs}} ({_NEW_COLUMNS})
  SELECT a.id, NULL, %(target)s::text, %(fingerprint)s::bytea, a.payload, a.key, %(queue)s::text, %(priority)s::smallint, 0,
    COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint),
    CASE WHEN COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint) <= t.now THEN t.now END,
    %(max_attempts)s::integer, %(timeout_ms)s::integer, %(on_crash)s::smallint, %(source)s::text, %(sequence)s::bigint, t.now, t.now
  FROM asked a, t ORDER BY a.key, a.n
  ON CONFLICT DO NOTHING RETURNING id, key),
missing AS MATERIALIZED (SELECT count(*) < cardinality(%(ids)s::uuid[]) AS any_left FROM ins),
own AS MATERIALIZED (SELECT id FROM {{jobs}} WHERE (SELECT any_left FROM missing) AND id = ANY(%(ids)s::uuid[])),
holders AS MATERIALIZED (SELECT id, key FROM {{jobs}} WHERE (SELECT any_left FROM missing) AND target = %(target)s::text
  AND key = ANY(%(keys)s::text[]) AND key IS NOT NULL AND state IN (0, 1, 3))
SELECT a.n, COALESCE(i.id, o.id, s.id, h.id) AS id, i.id IS NULL AND o.id IS NULL AS duplicate
FROM asked a LEFT JOIN ins i ON i.id = a.id LEFT JOIN own o ON i.id IS NULL AND o.id = a.id
LEFT JOIN ins s ON i.id IS NULL AND s.key = a.key LEFT JOIN holders h ON i.id IS NULL AND h.key = a.key
ORDER BY a.n
"""

RING_ONE = f"SELECT CASE WHEN {GATE} THEN {RING} END IS NOT NULL".replace("{queue}", "%(queue)s::text")

RING_MANY = f"SELECT CASE WHEN {GATE} THEN {RING} END IS NOT NULL FROM unnest(%(queues)s::text[]) q(queue)".replace(
    "{queue}", "q.queue"
)

EXISTS = """
SELECT 1 FROM {jobs} WHERE id = %(id)s::uuid UNION ALL SELECT 1 FROM {finished} WHERE id = %(id)s::uuid LIMIT 1
"""

_CLAIM = f"""
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM picked),
taken AS (UPDATE {{jobs}} j SET state = 1, attempt = j.attempt + 1, token = %(token)s::uuid, worker = %(worker)s::text,
    lease_until = (SELECT now FROM clock) + %(lease)s::bigint, ready_at = NULL,
    started_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
  WHERE j.id = ANY(ARRAY(SELECT id FROM picked)) AND j.state = 0
  RETURNING {", ".join("j." + name for name in CLAIMED_COLUMNS)})
SELECT c.now, p.ord, p.ready_at, {", ".join("t." + name for name in CLAIMED_COLUMNS)}
FROM clock c LEFT JOIN (taken t JOIN picked p USING (id)) ON true
"""

# Looks at everything: one index range a queue, best priority first.
CLAIM_SWEEP = (
    """
WITH picked AS MATERIALIZED (
  SELECT p.id, p.ready_at, lane.ord FROM unnest(%(queues)s::text[]) WITH ORDINALITY AS lane(queue, ord)
  CROSS JOIN LATERAL (SELECT j.id, j.ready_at FROM {jobs} j WHERE j.queue = lane.queue AND j.ready_at IS NOT NULL
    ORDER BY j.priority, j.ready_at, j.id LIMIT {limit} FOR UPDATE SKIP LOCKED) p
  LIMIT {limit}),"""
    + _CLAIM
)

# Starts at a low-water mark in each lane: while a snapshot is held open for hours, the index keeps an entry of every job done
# since, and a claim from the start walks all of them (measured: 5 times dearer after a minute, and growing).
CLAIM_MARKED = (
    """
WITH picked AS MATERIALIZED (
  SELECT p.id, p.ready_at, lane.ord
  FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(mark_at)s::bigint[], %(mark_id)s::uuid[])
    WITH ORDINALITY AS lane(queue, priority, mark_at, mark_id, ord)
  CROSS JOIN LATERAL (SELECT j.id, j.ready_at FROM {jobs} j WHERE j.queue = lane.queue AND j.priority = lane.priority
    AND j.ready_at IS NOT NULL AND (j.ready_at, j.id) > (lane.mark_at, lane.mark_id)
    ORDER BY j.ready_at, j.id LIMIT {limit} FOR UPDATE SKIP LOCKED) p
  LIMIT {limit}),"""
    + _CLAIM
)

_MOVED = ", ".join(name for name in FINISHED_COLUMNS if name not in ("state", "finished_at", "payload"))
_GONE = ", ".join("j." + name for name in FINISHED_COLUMNS if name not in ("state", "finished_at"))


def _moved(other: dict[str, str], source: str = "") -> str:
    """The moved columns in their order, some of them with another value."""
    return ", ".join(other.get(name, source + name) for name in _MOVED.split(", "))


# Only a settle leaves its token in the history: whoever asks again with the token of a cancelled or expired claim has lost it.
_CRASHED = {"token": "NULL", "lapses": "g.lapses + 1", "error_kind": "'crashed'", "error_summary": "NULL"}
_BY_OTHERS = _moved({"token": "NULL"})

# All plain successes: no facts come back, the row count tells whether every claim was ours.
SETTLE_FAST = f"""
WITH locked AS MATERIALIZED (
  SELECT j.id, j.token, j.lease_until FROM {{jobs}} j WHERE j.id = ANY(%(ids)s::uuid[]) ORDER BY j.id FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM locked),
gone AS (DELETE FROM {{jobs}} j WHERE j.id = ANY(ARRAY(
    SELECT l.id FROM clock c CROSS JOIN locked l JOIN unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) a(id, token)
      ON a.id = l.id AND a.token = l.token WHERE l.lease_until > c.now))
  RETURNING {_GONE})
INSERT INTO {{finished}} ({_MOVED}, payload, state, finished_at)
SELECT {_moved({"error_kind": "NULL", "error_summary": "NULL"})}, CASE WHEN %(keep)s::boolean THEN payload END, 4, (SELECT now FROM clock)
FROM gone
"""

# A job that is put back keeps the token until its next claim, and a finished one for ever: asked again with the same
# settlement, since the answer was lost with the connection, the database says "already" instead of "lost".
SETTLE = f"""
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(states)s::smallint[], %(kinds)s::text[], %(summaries)s::text[],
    %(delays)s::bigint[], %(refunds)s::integer[]) AS a(id, token, state, error_kind, error_summary, delay, refund)),
locked AS MATERIALIZED (
  SELECT j.id, j.token, j.state, j.lease_until FROM {{jobs}} j WHERE j.id = ANY(%(ids)s::uuid[]) ORDER BY j.id FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM locked),
owned AS MATERIALIZED (
  SELECT a.*, c.now FROM clock c CROSS JOIN locked l JOIN asked a USING (id)
  WHERE l.state = 1 AND l.token = a.token AND l.lease_until > c.now),
gone AS (DELETE FROM {{jobs}} j WHERE j.id = ANY(ARRAY(SELECT id FROM owned WHERE state > 3)) RETURNING {_GONE}),
again AS (UPDATE {{jobs}} j SET state = o.state, lease_until = NULL, attempt = j.attempt - o.refund,
    error_kind = COALESCE(o.error_kind, j.error_kind),
    error_summary = CASE WHEN o.error_kind IS NULL THEN j.error_summary ELSE o.error_summary END,
    run_at = CASE WHEN o.state = 0 AND (o.refund = 0 OR o.delay > 0) THEN o.now + o.delay ELSE j.run_at END,
    ready_at = CASE WHEN o.state = 0 AND o.delay = 0 THEN o.now END, updated_at = o.now
  FROM owned o WHERE o.state <= 3 AND j.id = o.id AND j.id = ANY(ARRAY(SELECT id FROM owned WHERE state <= 3)) RETURNING j.id),
kept AS (INSERT INTO {{finished}} ({_MOVED}, payload, state, finished_at)
  SELECT {_moved({"error_kind": "o.error_kind", "error_summary": "o.error_summary"}, "g.")},
    CASE WHEN o.state NOT IN (4, 5) OR %(keep)s::boolean THEN g.payload END, o.state, o.now
  FROM gone g JOIN owned o USING (id) RETURNING id),
still AS MATERIALIZED (SELECT j.id, j.token FROM {{jobs}} j WHERE j.id = ANY(%(ids)s::uuid[]))
SELECT a.id, a.token, CASE WHEN k.id IS NOT NULL THEN 'done'
  WHEN r.id IS NOT NULL THEN CASE WHEN a.state = 0 THEN 'again' ELSE 'done' END
  WHEN l.id IS NOT NULL THEN CASE WHEN l.token = a.token AND l.state = a.state THEN 'already' ELSE 'lost' END
  WHEN s.token = a.token THEN 'busy' ELSE 'lost' END AS fact
FROM asked a LEFT JOIN owned o ON o.id = a.id AND o.token = a.token
LEFT JOIN kept k ON k.id = o.id LEFT JOIN again r ON r.id = o.id LEFT JOIN locked l ON l.id = a.id LEFT JOIN still s ON s.id = a.id
"""

# Asked apart, and only for claims that came back lost: a COMMIT whose answer never arrived is "already", not lost.
ALREADY = "SELECT id, token, state FROM {finished} WHERE id = ANY(%(ids)s::uuid[])"

RENEW = f"""
WITH asked AS MATERIALIZED (SELECT * FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS a(id, token)),
locked AS MATERIALIZED (
  SELECT j.id, j.token, j.state, j.lease_until FROM {{jobs}} j WHERE j.id = ANY(%(ids)s::uuid[])
  ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM locked),
owned AS MATERIALIZED (
  SELECT a.id, a.token FROM clock c CROSS JOIN locked l JOIN asked a USING (id)
  WHERE l.state = 1 AND l.token = a.token AND l.lease_until > c.now),
renewed AS (UPDATE {{jobs}} j SET lease_until = (SELECT now FROM clock) + %(lease)s::bigint, updated_at = (SELECT now FROM clock)
  WHERE j.id = ANY(ARRAY(SELECT id FROM owned)) RETURNING j.id),
still AS MATERIALIZED (SELECT j.id, j.token FROM {{jobs}} j WHERE j.id = ANY(%(ids)s::uuid[]))
SELECT a.id, a.token, CASE WHEN r.id IS NOT NULL THEN 'renewed' WHEN l.id IS NOT NULL THEN 'lost'
  WHEN s.token = a.token THEN 'busy' ELSE 'lost' END AS fact
FROM asked a LEFT JOIN owned o ON o.id = a.id AND o.token = a.token
LEFT JOIN renewed r ON r.id = o.id LEFT JOIN locked l ON l.id = a.id LEFT JOIN still s ON s.id = a.id
"""

# The order keeps the planner to the claim index: LIMIT 1 alone lets it read the table for a queue that holds nothing.
PROBE = """
SELECT EXISTS (SELECT 1 FROM unnest(%(queues)s::text[]) q(queue)
  CROSS JOIN LATERAL (SELECT 1 FROM {jobs} j WHERE j.queue = q.queue AND j.ready_at IS NOT NULL
    ORDER BY j.priority, j.ready_at, j.id LIMIT 1) one)
"""

# After a lost connection: rows that were claimed for this worker in a transaction whose answer never arrived.
RELEASE_UNKNOWN = f"""
WITH mine AS MATERIALIZED (SELECT id FROM {{jobs}} WHERE state = 1 AND worker = %(worker)s::text
  AND NOT id = ANY(%(known)s::uuid[]) FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM mine)
UPDATE {{jobs}} j SET state = 0, token = NULL, lease_until = NULL, attempt = attempt - 1,
  ready_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
WHERE j.id = ANY(ARRAY(SELECT id FROM mine))
"""

# A clock read before a SKIP LOCKED lock is safe here: what is due stays due, and a row that changed is tested again.
# A next_run of now means that the limit was reached and more is due.
PROMOTE = f"""
WITH clock AS MATERIALIZED (SELECT {NOW} AS now),
due AS MATERIALIZED (SELECT id FROM {{jobs}} WHERE state = 0 AND ready_at IS NULL AND run_at >= %(mark)s::bigint
  AND run_at <= (SELECT now FROM clock) ORDER BY run_at, id LIMIT {{limit}} FOR UPDATE SKIP LOCKED),
moved AS (UPDATE {{jobs}} j SET ready_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
  WHERE j.id = ANY(ARRAY(SELECT id FROM due)) AND j.state = 0 AND j.ready_at IS NULL RETURNING j.queue),
queues AS MATERIALIZED (SELECT queue, count(*) AS n FROM moved GROUP BY queue)
SELECT (SELECT now FROM clock), COALESCE((SELECT sum(n) FROM queues), 0)::bigint,
  (SELECT run_at FROM {{jobs}} WHERE state = 0 AND ready_at IS NULL AND run_at > (SELECT now FROM clock) ORDER BY run_at, id LIMIT 1),
  (SELECT count(*) FROM queues WHERE CASE WHEN {{notify}} THEN CASE WHEN {GATE} THEN {RING} IS NOT NULL END END)
""".replace("{queue}", "queues.queue")

EXPIRE = f"""
WITH clock AS MATERIALIZED (SELECT {NOW} AS now),
due AS MATERIALIZED (SELECT id, CASE WHEN on_crash = 1 THEN 3 WHEN on_crash = 2 OR attempt >= max_attempts THEN 6 ELSE 0 END AS next
  FROM {{jobs}} WHERE state = 1 AND lease_until >= %(mark)s::bigint AND lease_until <= (SELECT now FROM clock)
  ORDER BY lease_until LIMIT {{limit}} FOR UPDATE SKIP LOCKED),
back AS (UPDATE {{jobs}} j SET state = d.next, token = NULL, lease_until = NULL, lapses = j.lapses + 1, error_kind = 'crashed',
    error_summary = NULL, ready_at = CASE WHEN d.next = 0 THEN (SELECT now FROM clock) END, updated_at = (SELECT now FROM clock)
  FROM due d WHERE d.next <> 6 AND j.id = d.id AND j.id = ANY(ARRAY(SELECT id FROM due WHERE next <> 6)) RETURNING j.queue, j.state),
gone AS (DELETE FROM {{jobs}} j WHERE j.id = ANY(ARRAY(SELECT id FROM due WHERE next = 6)) RETURNING {_GONE}),
kept AS (INSERT INTO {{finished}} ({_MOVED}, payload, state, finished_at)
  SELECT {_moved(_CRASHED, "g.")},
    g.payload, 6, (SELECT now FROM clock) FROM gone g RETURNING id),
queues AS MATERIALIZED (SELECT queue, count(*) AS n FROM back WHERE state = 0 GROUP BY queue)
SELECT (SELECT now FROM clock), COALESCE((SELECT sum(n) FROM queues), 0)::bigint, (SELECT count(*) FROM kept),
  (SELECT count(*) FROM back WHERE state = 3),
  (SELECT count(*) FROM queues WHERE CASE WHEN {{notify}} THEN CASE WHEN {GATE} THEN {RING} IS NOT NULL END END)
""".replace("{queue}", "queues.queue")

PRUNE = """
WITH old AS MATERIALIZED (SELECT id, finished_at FROM {finished}
  WHERE state = %(state)s::smallint AND finished_at < %(before)s::bigint ORDER BY finished_at LIMIT {limit} FOR UPDATE SKIP LOCKED)
DELETE FROM {finished} f WHERE f.id = ANY(ARRAY(SELECT id FROM old)) AND (f.id, f.finished_at) IN (SELECT id, finished_at FROM old)
"""

_FOUND = """
SELECT COALESCE((SELECT state FROM {jobs} WHERE id = %(id)s::uuid),
  (SELECT state FROM {finished} WHERE id = %(id)s::uuid ORDER BY finished_at DESC LIMIT 1))
"""

CANCEL = f"""
WITH clock AS MATERIALIZED (SELECT {NOW} AS now),
gone AS (DELETE FROM {{jobs}} j WHERE j.id = %(id)s::uuid AND j.state IN (0, 1, 2) RETURNING {_GONE})
INSERT INTO {{finished}} ({_MOVED}, payload, state, finished_at)
SELECT {_BY_OTHERS}, payload, 7, (SELECT now FROM clock) FROM gone
"""

_BACK = ", ".join(name for name in JOB_COLUMNS if name not in (
    "state", "attempt", "lapses", "run_at", "ready_at", "token", "worker", "lease_until", "started_at", "updated_at",
))  # fmt: skip

# A finished job comes back under its id with a fresh count of attempts; DO NOTHING covers its key taken by another job.
RETRY_FINISHED = f"""
WITH clock AS MATERIALIZED (SELECT {NOW} AS now),
last AS MATERIALIZED (SELECT * FROM {{finished}} WHERE id = %(id)s::uuid ORDER BY finished_at DESC LIMIT 1 FOR UPDATE),
ins AS (INSERT INTO {{jobs}} ({_BACK}, state, attempt, lapses, run_at, ready_at, updated_at)
  SELECT {_BACK}, 0, 0, 0, clock.now, clock.now, clock.now FROM last, clock WHERE last.state IN (4, 5, 6, 7) AND payload IS NOT NULL
  ON CONFLICT DO NOTHING RETURNING id),
del AS (DELETE FROM {{finished}} f USING last WHERE f.id = last.id AND f.finished_at = last.finished_at
  AND f.id IN (SELECT id FROM ins) RETURNING f.id)
SELECT last.state, last.payload IS NOT NULL, EXISTS (SELECT 1 FROM del), last.queue FROM last
"""

RETRY_BLOCKED = f"""
WITH clock AS MATERIALIZED (SELECT {NOW} AS now)
UPDATE {{jobs}} j SET state = 0, run_at = (SELECT now FROM clock), ready_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock),
  token = NULL, attempt = CASE WHEN attempt >= max_attempts THEN 0 ELSE attempt END
WHERE j.id = %(id)s::uuid AND j.state = 2 AND NOT EXISTS (SELECT 1 FROM {{jobs}} k
  WHERE k.target = j.target AND k.key = j.key AND k.key IS NOT NULL AND k.state IN (0, 1, 3))
RETURNING j.queue
"""

RESOLVE = f"""
WITH clock AS MATERIALIZED (SELECT {NOW} AS now),
gone AS (DELETE FROM {{jobs}} j WHERE j.id = %(id)s::uuid AND j.state = 3 AND j.updated_at = %(expected)s::bigint RETURNING {_GONE})
INSERT INTO {{finished}} ({_MOVED}, payload, state, finished_at)
SELECT {_BY_OTHERS}, payload, %(state)s::smallint, (SELECT now FROM clock) FROM gone
"""

# SQLSTATEs that say: this connection, or the server behind it, is of no use; take another one.
_CONNECTION_STATES = ("08", "57P01", "57P02", "57P03", "57P05", "25006", "25P03", "25P04", "53300", "3D000")
_BUSY_STATES = ("40001", "40P01", "55P03", "55006")
_MISSING_STATES = ("42P01", "3F000")
_KEY_STATE = "23505"


class Marks:
    """Low-water marks of one worker connection: places in the indexes behind which nothing is left to find.

    A mark never passes ``now`` minus LAG: a transaction that took its time to commit lands behind the newest row seen, but
    rarely further back. What it lands behind is found by the sweep, which may cost 5 % of the time. A clock that stepped
    back resets every mark, since new jobs would be written behind it; a new connection starts without marks."""

    LAG = 200_000
    SHARE = 20
    SHORTEST = 0.02
    CHEAP = 0.02

    def __init__(self) -> None:
        self.now = 0
        self.lanes: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.waiting = 0
        self.lease = 0
        self._next: dict[str, float] = {}
        self._cost: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def saw(self, now: int) -> None:
        if now < self.now:
            self.lanes.clear()
            self.waiting = self.lease = 0
            self._next.clear()
        self.now = now

    def sweep_due(self, probe: str) -> bool:
        return time.monotonic() >= self._next.get(probe, 0.0)

    def may_look(self, probe: str) -> bool:
        """Whether a look that found little may be followed by a sweep: the budget is only there for sweeps that became dear."""
        return self._cost.get(probe, 0.0) <= self.CHEAP or self.sweep_due(probe)

    def swept(self, probe: str, began: float) -> None:
        """The cheaper of the last two sweeps counts: one that was planned anew, or met a busy moment, would forbid them for seconds."""
        now = time.monotonic()
        cost = now - began
        counts = min(cost, self._last.get(probe, 0.0))
        self._last[probe], self._cost[probe] = cost, counts
        self._next[probe] = now + max(self.SHORTEST, self.SHARE * counts)

    def claimed(self, queue: str, priority: int, ready_at: int, job_id: bytes) -> None:
        newest = self.now - self.LAG
        mark = (ready_at, job_id) if ready_at < newest else (newest, ZERO)
        self.lanes[queue, priority] = max(mark, self.lanes.get((queue, priority), (0, ZERO)))

    def lanes_of(self, queues: Sequence[str]) -> list[tuple[str, int, int, bytes]]:
        return [
            (queue, priority, *self.lanes[queue, priority])
            for queue in queues
            for priority in range(10)
            if (queue, priority) in self.lanes
        ]


class PostgresSession:
    """One of dbqueue's own connections: autocommit, so a single statement is one round trip."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.changed = 0
        self.marks = Marks()
        self._cursor = connection.cursor(binary=True)

    def execute(self, statement: str, params: Any = None) -> list[Row]:
        cursor = self._cursor
        cursor.execute(statement, params)
        self.changed = cursor.rowcount
        return cursor.fetchall() if cursor.description else []

    def begin(self, deadline: float | None = None) -> None:
        # A role may default to serializable or read only; our own transactions say what they need.
        self.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback(self) -> None:
        self.execute("ROLLBACK")

    def close(self) -> None:
        self.connection.close()


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
        soon: int = 250_000,
        keep: bool = False,
    ) -> None:
        self.url, self.names, self.clock = url, names, clock
        self.notify, self.soon, self.keep = notify, soon, keep
        self._sqlalchemy = sqlalchemy_psycopg.dialect()  # type: ignore[no-untyped-call]
        fill = names.fill
        enqueue = ENQUEUE if notify else ENQUEUE.replace(GATE.replace("{queue}", "%(queue)s::text"), "false")
        self._enqueue, self._enqueue_many, self._exists = fill(enqueue), fill(ENQUEUE_MANY), fill(EXISTS)
        self._settle_fast, self._settle, self._already = fill(SETTLE_FAST), fill(SETTLE), fill(ALREADY)
        self._renew, self._probe, self._release_unknown = fill(RENEW), fill(PROBE), fill(RELEASE_UNKNOWN)
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
        return PostgresSession(driver_connection)

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
            "id": job.id.hex(), "task_id": job.task_id, "payload": job.payload, "key": job.key, "soon": self.soon,
        }  # fmt: skip
        # No row: the holder of the key ended between our insert and our look. The next try sees a new snapshot.
        for _ in range(20):
            rows = session.execute(self._enqueue, params)
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
            rows = session.execute(self._enqueue_many, params)
            for ordinal, job_id, duplicate in rows:
                if job_id is not None:
                    out[left[ordinal - 1]] = Enqueued(as_bytes(job_id), bool(duplicate))
            left = [n for n in left if n not in out]
            if not left:
                break
        else:
            raise DatabaseBusy("other transactions kept taking and freeing these jobs' keys; try again")
        soon = jobs[0].run_at is not None or jobs[0].delay < self.soon
        if self.notify and soon and not all(enqueued.duplicate for enqueued in out.values()):
            session.execute(RING_ONE, {"salt": self.names.salt, "queue": jobs[0].queue})
        return [out[n] for n in range(len(jobs))]

    def _new(self, job: NewJob) -> dict[str, Any]:
        return {
            "target": job.target, "fingerprint": job.fingerprint, "queue": job.queue, "priority": job.priority,
            "run_at": job.run_at, "delay": job.delay, "max_attempts": job.max_attempts, "timeout_ms": job.timeout_ms,
            "on_crash": int(job.on_crash), "source": job.source, "sequence": job.sequence,
            "offset": self.clock.offset, "salt": self.names.salt,
        }  # fmt: skip

    def exists(self, session: Session, job_id: bytes) -> bool:
        return bool(session.execute(self._exists, {"id": job_id.hex()}))

    # -- executors ---------------------------------------------------------------------------------------------------

    def turn(self, session: OwnSession, turn: Turn) -> TurnResult:
        """Settle, renew, claim as one pipelined round trip: its implicit transaction commits at the one Sync, so there is
        no BEGIN and no COMMIT to send. The claim stays last: nothing but the commit follows the locks that it takes."""
        assert isinstance(session, PostgresSession)
        result, steps = TurnResult(), self._steps(session, turn)
        began = time.monotonic()
        connection = session.connection
        cursors = [connection.cursor(binary=True) for _ in steps]
        with connection.pipeline():
            for cursor, (_, statement, params) in zip(cursors, steps, strict=True):
                cursor.execute(statement, params, prepare=True)
        for cursor, (what, _, _) in zip(cursors, steps, strict=True):
            if what == "fast":
                if cursor.rowcount == len(turn.settlements):
                    result.settled = [Fact.DONE] * len(turn.settlements)
                else:
                    result.settled = self._after_commit(
                        lambda: self.settle(session, turn.settlements), [Fact.BUSY] * len(turn.settlements)
                    )
            elif what == "settle":
                rows = cursor.fetchall()
                result.settled = self._after_commit(
                    lambda rows=rows: self._facts(session, turn.settlements, rows),  # type: ignore[misc]
                    _in_order(turn.settlements, rows),
                )
            elif what == "renew":
                result.renewed = _in_order(turn.renewals, cursor.fetchall())
            elif what in ("sweep", "marked"):
                assert turn.claim is not None
                self._claimed(session.marks, turn.claim, cursor.fetchall(), result)
                result.whole = what == "sweep"
                if result.whole:
                    session.marks.swept("claim", began)
                elif len(result.claimed) < turn.claim.limit and session.marks.may_look("claim"):
                    self._look_again(session, turn.claim, result)
        return result

    def _look_again(self, session: PostgresSession, claim: ClaimRequest, result: TurnResult) -> None:
        """Few or no jobs behind the marks are no answer: there are marks only where this worker claimed before, and it would
        go to sleep on what other lanes hold."""
        began = time.monotonic()
        _, text, params = self._sweep_step(replace(claim, limit=claim.limit - len(result.claimed)))
        nothing: list[Row] = []
        rows = self._after_commit(lambda: session.execute(text, params), nothing)
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
                ids, tokens = _identities(turn.settlements)
                steps.append(
                    ("fast", self._settle_fast, self._clock() | {"ids": ids, "tokens": tokens, "keep": self.keep})
                )
            else:
                steps.append(("settle", self._settle, self._settle_params(turn.settlements)))
                queues = sorted({s.queue for s in turn.settlements if s.state is State.PENDING and s.delay < self.soon})
                if queues and self.notify:
                    steps.append(("ring", RING_MANY, {"salt": self.names.salt, "queues": queues}))
        if turn.renewals:
            ids, tokens = _identities(turn.renewals)
            steps.append(("renew", self._renew, self._clock() | {"ids": ids, "tokens": tokens, "lease": turn.lease}))
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
        # Few texts (1, 2, 4 ...), so that each is planned once and then served from its generic plan.
        limit = 1 << (claim.limit.bit_length() - 1)
        return limit, self._clock() | {"token": claim.token.hex(), "worker": claim.worker, "lease": claim.lease}

    def _text(self, template: str, limit: int) -> str:
        return self.names.fill(template).replace("{limit}", str(limit)).replace("{notify}", str(self.notify).lower())

    def _claimed(self, marks: Marks, claim: ClaimRequest, rows: list[Row], result: TurnResult) -> None:
        result.now = now = rows[0][0]
        marks.saw(now)
        found = []
        for row in rows:
            if row[3] is None:
                continue
            _, lane, ready_at, job_id, task_id, target, fingerprint, payload, key, queue, priority, *rest = row
            claimed = ClaimedRow(
                job_id, claim.token, task_id, target, fingerprint, payload, key, queue, priority, ready_at, *rest
            )
            found.append((lane, priority, ready_at, job_id, claimed))
        found.sort(key=lambda item: item[:4])  # RETURNING has no order
        result.claimed += [item[4] for item in found]
        for _, priority, ready_at, job_id, claimed in found:
            marks.claimed(claimed.queue, priority, ready_at, job_id)

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

    def release_unknown(self, session: OwnSession, worker: str, known: Sequence[bytes]) -> int:
        session.execute(self._release_unknown, self._clock() | {"worker": worker, "known": [k.hex() for k in known]})
        return session.changed

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def upkeep(self, session: OwnSession, limit: int, queues: tuple[str, ...], *, expire: bool = True) -> Due:
        """Makes due jobs claimable and takes back jobs whose lease ended: two bounded statements, each its own transaction. Without
        ``expire`` only the first: waiting jobs are due to the moment, lost ones can wait a part of their lease."""
        assert isinstance(session, PostgresSession)
        marks, began = session.marks, time.monotonic()
        whole = marks.sweep_due("upkeep")
        params = self._clock() | {"salt": self.names.salt}
        promote = self._text(PROMOTE, limit)
        now, promoted, next_run, _ = session.execute(promote, params | {"mark": 0 if whole else marks.waiting})[0]
        again = dead = unknown = 0
        if expire:
            take_back = self._text(EXPIRE, limit)
            now, again, dead, unknown, _ = session.execute(take_back, params | {"mark": 0 if whole else marks.lease})[0]
        marks.saw(now)
        if promoted < limit:
            marks.waiting = now - marks.LAG
        if expire and again + dead + unknown < limit:
            marks.lease = now - marks.LAG
        if whole:
            marks.swept("upkeep", began)
        more = promoted >= limit or again + dead + unknown >= limit
        return Due(now, promoted, again, dead, unknown, now if more else next_run, None)

    def prune(self, session: Session, states: Sequence[State], before: int, limit: int) -> int:
        total = 0
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


def _in_order(claims: Sequence[Settlement] | Sequence[Held], rows: list[Row]) -> list[Fact]:
    """By id and token: a worker that lost a claim and took the same job again asks about both."""
    facts = {(as_bytes(job_id), as_bytes(token)): Fact(as_text(fact)) for job_id, token, fact in rows}
    return [facts[c.id, c.token] for c in claims]
