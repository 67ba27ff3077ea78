"""PostgreSQL's verbs as statements, in the order in which ``postgres`` uses them. What holds for all of them is told there."""

from __future__ import annotations

from dbqueue.clock import POSTGRES_NOW
from dbqueue.database.tables import CLAIMED_COLUMNS, FINISHED_COLUMNS, JOB_COLUMNS

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
    "on_crash, source, sequence, head, expires_at, created_at, updated_at"
)

_PLAIN_COLUMNS = _NEW_COLUMNS.replace("key, ", "", 1)

# The id may be there already: the first try of an insert whose answer was lost commits late, while the second one is under way.
ENQUEUE = f"""
WITH t AS MATERIALIZED (SELECT {NOW} AS now),
ins AS (INSERT INTO {{jobs}} ({_NEW_COLUMNS})
  SELECT %(id)s::uuid, %(task_id)s::text, %(target)s::text, %(fingerprint)s::bytea, %(payload)s::bytea, %(key)s::text, %(queue)s::text,
    %(priority)s::smallint, 0, COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint),
    CASE WHEN COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint) <= t.now THEN t.now END,
    %(max_attempts)s::integer, %(timeout_ms)s::integer, %(on_crash)s::smallint, %(source)s::text, %(sequence)s::bigint,
    %(head)s::bytea, t.now + %(ttl)s::bigint, t.now, t.now
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

# The same for a job without a key, for connections on which nothing may be prepared: each call is parsed and planned anew, and the
# statement above costs more of both than of its execution. No row: the id is there already, which the other one looks into.
ENQUEUE_PLAIN = f"""
INSERT INTO {{jobs}} ({_PLAIN_COLUMNS})
SELECT %(id)s::uuid, %(task_id)s::text, %(target)s::text, %(fingerprint)s::bytea, %(payload)s::bytea, %(queue)s::text,
  %(priority)s::smallint, 0, COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint),
  CASE WHEN COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint) <= t.now THEN t.now END,
  %(max_attempts)s::integer, %(timeout_ms)s::integer, %(on_crash)s::smallint, %(source)s::text, %(sequence)s::bigint,
  %(head)s::bytea, t.now + %(ttl)s::bigint, t.now, t.now
FROM (SELECT {NOW} AS now) t
ON CONFLICT DO NOTHING
RETURNING CASE WHEN CASE WHEN run_at < created_at + %(soon)s::bigint THEN {GATE} ELSE false END THEN {RING} END IS NOT NULL AS rang
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
    %(max_attempts)s::integer, %(timeout_ms)s::integer, %(on_crash)s::smallint, %(source)s::text, %(sequence)s::bigint,
    %(head)s::bytea, t.now + %(ttl)s::bigint, t.now, t.now
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

INSERT_DUE = f"""
WITH t AS MATERIALIZED (SELECT {NOW} AS now)
INSERT INTO {{jobs}} ({_NEW_COLUMNS})
SELECT a.id, a.task_id, a.target, a.fingerprint, a.payload, a.key, a.queue, a.priority, 0, COALESCE(a.run_at, t.now + a.delay),
  CASE WHEN COALESCE(a.run_at, t.now + a.delay) <= t.now THEN t.now END, a.max_attempts, a.timeout_ms, a.on_crash, a.source, a.sequence,
  a.head, t.now + a.ttl, t.now, t.now
FROM unnest(%(ids)s::uuid[], %(task_ids)s::text[], %(targets)s::text[], %(fingerprints)s::bytea[], %(payloads)s::bytea[],
  %(keys)s::text[], %(queues)s::text[], %(priorities)s::smallint[], %(run_ats)s::bigint[], %(delays)s::bigint[],
  %(max_attempts)s::integer[], %(timeouts)s::integer[], %(on_crash)s::smallint[], %(sources)s::text[], %(sequences)s::bigint[],
  %(heads)s::bytea[], %(ttls)s::bigint[]) WITH ORDINALITY AS a(id, task_id, target, fingerprint, payload, key, queue, priority, run_at,
  delay, max_attempts, timeout_ms, on_crash, source, sequence, head, ttl, n), t
ORDER BY a.target, a.key, a.n
ON CONFLICT DO NOTHING RETURNING id
"""

# By compare-and-set, though whoever fires holds the row's lock: a cursor never moves twice, and never back.
MOVE_CURSORS = f"""
WITH t AS MATERIALIZED (SELECT {NOW} AS now)
UPDATE {{schedules}} s SET last_slot = a.last_slot, next_at = a.next_at, planned = s.spec || ' ' || s.timezone,
  fired = s.fired + a.fired, fired_at = CASE WHEN a.fired > 0 THEN t.now ELSE s.fired_at END, error = a.error, updated_at = t.now
FROM unnest(%(owners)s::text[], %(names)s::text[], %(was)s::bigint[], %(last_slots)s::bigint[], %(next_ats)s::bigint[],
  %(fired)s::bigint[], %(errors)s::text[]) AS a(owner, name, was, last_slot, next_at, fired, error), t
WHERE s.owner = a.owner AND s.name = a.name AND s.last_slot = a.was
"""

# A success stays until it has expired: a second run of its task (redelivered after a lost worker) must not take it back. The gate stands
# in the RETURNING, as in ENQUEUE.
STORE_RESULT = f"""
WITH t AS MATERIALIZED (SELECT {NOW} AS now),
ins AS (INSERT INTO {{results}} AS r (task_id, state, meta, expires_at, stored_at)
  SELECT %(task_id)s::text, %(state)s::text, %(meta)s::bytea, t.now + %(ttl)s::bigint, t.now FROM t
  ON CONFLICT (task_id) DO UPDATE SET state = excluded.state, meta = excluded.meta, expires_at = excluded.expires_at,
    stored_at = excluded.stored_at
  WHERE r.state <> 'SUCCESS' OR r.expires_at <= excluded.stored_at
  RETURNING {GATE} AS sleeper)
SELECT CASE WHEN sleeper THEN {RING} END IS NOT NULL FROM ins
""".replace("{queue}", "%(bell)s::text")

# The chord's row is locked first and read as it is then (DO UPDATE does both), the part written and counted under that lock.
LOCK_CHORD = f"""
WITH t AS MATERIALIZED (SELECT {NOW} AS now)
INSERT INTO {{chords}} AS c (group_id, expires_at) SELECT %(group_id)s::text, t.now + %(ttl)s::bigint FROM t
ON CONFLICT (group_id) DO UPDATE SET expires_at = CASE WHEN c.done THEN c.expires_at ELSE excluded.expires_at END RETURNING done
"""
COUNT_PART = """
WITH ins AS (INSERT INTO {chord_parts} (group_id, task_id, part, meta)
  VALUES (%(group_id)s::text, %(task_id)s::text, %(part)s::integer, %(meta)s::bytea) ON CONFLICT DO NOTHING RETURNING 1)
UPDATE {chords} SET returned = returned + (SELECT count(*) FROM ins) WHERE group_id = %(group_id)s::text RETURNING returned, size + extra
"""

# One writer after the other, so that the order of numbers is the order of commits and a reader's cursor skips nothing. The lock is
# taken in the FROM, before the row exists, and goes with the commit of this one statement. The commit does not wait for the disk,
# so a bell rung without the gate holds up nobody for long.
POST = f"""
WITH turn AS MATERIALIZED (SELECT pg_advisory_xact_lock(hashtextextended('dbqueue.mail' || %(salt)s::text, 0))),
sent AS (INSERT INTO {{mail}} (id, exchange, routing_key, head, payload, expires_at)
  SELECT nextval('{{mail_ids}}'), %(exchange)s::text, %(routing_key)s::text, %(head)s::bytea, %(payload)s::bytea, {NOW} + %(ttl)s::bigint
  FROM turn RETURNING id)
SELECT sent.id, CASE WHEN {{notify}} THEN {RING} END IS NOT NULL
FROM sent CROSS JOIN unnest(%(queues)s::text[]) q(queue)
""".replace("{queue}", "q.queue")

EXISTS = """
SELECT 1 FROM {jobs} WHERE id = %(id)s::uuid UNION ALL SELECT 1 FROM {finished} WHERE id = %(id)s::uuid LIMIT 1
"""

# First in every transaction of the worker, and gone with it, so nothing leaks through a transaction pooler; once for good in a
# session that has the server to itself. Our statements have one
# sensible plan: nested loops over index ranges, in index order. The planner finds it dear where statistics are missing or old, as they
# are on a table whose rows live for milliseconds: a claim of 96 then read and sorted the whole backlog (bitmap scan, 12 ms at 20,000
# rows, growing), and every execution was planned anew.
PLANNING = (
    "SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true), "
    "set_config('plan_cache_mode', 'force_generic_plan', true), set_config('jit', 'off', true), "
    # Not a matter of plans: somebody's LOCK TABLE or ALTER TABLE must not keep a worker's loop from timeouts and signals.
    "set_config('lock_timeout', '1s', true)"
)
PLANNING_FOR_GOOD = PLANNING.replace(", true)", ", false)")

# In transactions of our own that are no worker's. A key's holder may be an open transaction of the very thread that waits for it,
# which no server can tell. A shorter time of the role's own stays.
PATIENCE = "set_config('lock_timeout', COALESCE(NULLIF(current_setting('lock_timeout'), '0'), '10s'), true)"

_CLAIM = f"""
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM picked),
taken AS (UPDATE {{jobs}} j SET state = 1, attempt = j.attempt + 1, token = %(token)s::uuid, worker = %(worker)s::text,
    lease_until = (SELECT now FROM clock) + %(lease)s::bigint, queued_at = j.ready_at,
    ready_at = NULL, started_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
  WHERE j.id = ANY(ARRAY(SELECT id FROM picked)) AND j.state = 0
  RETURNING j.queued_at, {", ".join("j." + name for name in CLAIMED_COLUMNS)})
SELECT c.now, t.* FROM clock c LEFT JOIN taken t ON true
"""

# Looks at everything: one index range a queue, best priority first.
CLAIM_SWEEP = (
    """
WITH picked AS MATERIALIZED (
  SELECT p.id FROM unnest(%(queues)s::text[]) AS lane(queue)
  CROSS JOIN LATERAL (SELECT j.id FROM {jobs} j WHERE j.queue = lane.queue AND j.ready_at IS NOT NULL
    ORDER BY j.priority, j.ready_at, j.id LIMIT {limit} FOR UPDATE SKIP LOCKED) p
  LIMIT {limit}),"""
    + _CLAIM
)

# Starts at a low-water mark in each lane: while a snapshot is held open for hours, the index keeps an entry of every job done
# since, and a claim from the start walks all of them (measured: 5 times dearer after a minute, and growing).
CLAIM_MARKED = (
    """
WITH picked AS MATERIALIZED (
  SELECT p.id FROM unnest(%(queues)s::text[], %(priorities)s::smallint[], %(mark_at)s::bigint[], %(mark_id)s::uuid[])
    AS lane(queue, priority, mark_at, mark_id)
  CROSS JOIN LATERAL (SELECT j.id FROM {jobs} j WHERE j.queue = lane.queue AND j.priority = lane.priority
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
    %(delays)s::bigint[], %(refunds)s::integer[], %(payloads)s::bytea[])
    AS a(id, token, state, error_kind, error_summary, delay, refund, payload)),
locked AS MATERIALIZED (
  SELECT j.id, j.token, j.state, j.lease_until FROM {{jobs}} j WHERE j.id = ANY(%(ids)s::uuid[]) ORDER BY j.id FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM locked),
owned AS MATERIALIZED (
  SELECT a.*, c.now FROM clock c CROSS JOIN locked l JOIN asked a USING (id)
  WHERE l.state = 1 AND l.token = a.token AND l.lease_until > c.now),
gone AS (DELETE FROM {{jobs}} j WHERE j.id = ANY(ARRAY(SELECT id FROM owned WHERE state > 3)) RETURNING {_GONE}),
again AS (UPDATE {{jobs}} j SET state = o.state, lease_until = NULL, attempt = j.attempt - o.refund,
    lapses = j.lapses + CASE WHEN o.error_kind = 'crashed' THEN 1 ELSE 0 END,
    payload = COALESCE(o.payload, j.payload), max_attempts = j.max_attempts + CASE WHEN o.payload IS NULL THEN 0 ELSE 1 END,
    error_kind = COALESCE(o.error_kind, j.error_kind),
    error_summary = CASE WHEN o.error_kind IS NULL THEN j.error_summary ELSE o.error_summary END,
    run_at = CASE WHEN o.state = 0 AND o.delay >= 0 AND (o.refund = 0 OR o.delay > 0) THEN o.now + o.delay ELSE j.run_at END,
    ready_at = CASE WHEN o.state = 0 AND o.delay = 0 THEN o.now WHEN o.state = 0 AND o.delay < 0 THEN COALESCE(j.queued_at, o.now) END,
    updated_at = o.now
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
ALREADY = "SELECT id, token, state FROM {finished} WHERE id = ANY(ARRAY(SELECT unnest(%(ids)s::uuid[])))"

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

# After a lost connection: rows that were claimed for this worker in a transaction whose answer never arrived. Where the lease has ended
# it may be a claim that the worker forgot for that very reason, begun and run; so that is a lapse, for the sweep.
RELEASE_UNKNOWN = f"""
WITH mine AS MATERIALIZED (SELECT id, lease_until FROM {{jobs}} WHERE state = 1 AND worker = %(worker)s::text
  AND (id, token) NOT IN (SELECT k.id, k.token FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) k(id, token))
  FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM mine)
UPDATE {{jobs}} j SET state = 0, token = NULL, lease_until = NULL, attempt = attempt - 1,
  ready_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
WHERE j.id = ANY(ARRAY(SELECT m.id FROM clock c CROSS JOIN mine m WHERE m.lease_until > c.now))
"""

# After the clock went back: a claim that was renewed in what is now the future counts as renewed now. Its worker, if it lives, does so
# in time; if it died, the job would wait for the clock to come round to the old end of its lease.
SHORTEN = f"""
WITH before AS MATERIALIZED (SELECT {NOW} AS now),
ahead AS MATERIALIZED (SELECT id FROM {{jobs}} WHERE state = 1 AND updated_at > (SELECT now FROM before) FOR NO KEY UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, {NOW} AS now FROM ahead)
UPDATE {{jobs}} j SET lease_until = c.now + (j.lease_until - j.updated_at), updated_at = c.now
FROM clock c WHERE j.id = ANY(ARRAY(SELECT id FROM ahead)) AND j.state = 1 AND j.updated_at > c.now
"""

# The one statement of an idle worker's poll: is anything due, lost, or claimable, and when is the next job due?
LOOK = f"""
WITH clock AS MATERIALIZED (SELECT {NOW} AS now)
SELECT c.now,
  EXISTS (SELECT 1 FROM {{jobs}} WHERE state = 0 AND ready_at IS NULL AND run_at >= %(waiting)s::bigint AND run_at <= c.now),
  EXISTS (SELECT 1 FROM {{jobs}} WHERE state = 1 AND lease_until >= %(lease)s::bigint AND lease_until <= c.now),
  EXISTS (SELECT 1 FROM unnest(%(queues)s::text[]) q(queue)
    CROSS JOIN LATERAL (SELECT 1 FROM {{jobs}} j WHERE j.queue = q.queue AND j.ready_at IS NOT NULL LIMIT 1) one),
  (SELECT run_at FROM {{jobs}} WHERE state = 0 AND ready_at IS NULL AND run_at > c.now ORDER BY run_at, id LIMIT 1)
FROM clock c
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
    "state", "attempt", "lapses", "run_at", "ready_at", "queued_at", "token", "worker", "lease_until", "started_at", "updated_at",
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
