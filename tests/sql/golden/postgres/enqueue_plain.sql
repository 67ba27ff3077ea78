INSERT INTO "public"."dbqueue_jobs" (id, task_id, target, fingerprint, payload, queue, priority, state, run_at, ready_at, max_attempts, timeout_ms, on_crash, source, sequence, head, expires_at, created_at, updated_at)
SELECT %(id)s::uuid, %(task_id)s::text, %(target)s::text, %(fingerprint)s::bytea, %(payload)s::bytea, %(queue)s::text,
  %(priority)s::smallint, 0, COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint),
  CASE WHEN COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint) <= t.now THEN t.now END,
  %(max_attempts)s::integer, %(timeout_ms)s::integer, %(on_crash)s::smallint, %(source)s::text, %(sequence)s::bigint,
  %(head)s::bytea, t.now + %(ttl)s::bigint, t.now, t.now
FROM (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now) t
ON CONFLICT DO NOTHING
RETURNING CASE WHEN CASE WHEN run_at < created_at + %(soon)s::bigint THEN CASE WHEN pg_try_advisory_lock(hashtextextended(%(salt)s::text || %(queue)s::text, 0)) THEN NOT pg_advisory_unlock(hashtextextended(%(salt)s::text || %(queue)s::text, 0)) ELSE true END ELSE false END THEN pg_notify('dbqueue_' || to_hex(hashtextextended(%(salt)s::text || %(queue)s::text, 0)), '') END IS NOT NULL AS rang
