WITH t AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now),
ins AS (INSERT INTO "public"."dbqueue_results" AS r (task_id, state, meta, expires_at, stored_at)
  SELECT %(task_id)s::text, %(state)s::text, %(meta)s::bytea, t.now + %(ttl)s::bigint, t.now FROM t
  ON CONFLICT (task_id) DO UPDATE SET state = excluded.state, meta = excluded.meta, expires_at = excluded.expires_at,
    stored_at = excluded.stored_at
  WHERE r.state <> 'SUCCESS' OR r.expires_at <= excluded.stored_at
  RETURNING CASE WHEN pg_try_advisory_lock(hashtextextended(%(salt)s::text || %(bell)s::text, 0)) THEN NOT pg_advisory_unlock(hashtextextended(%(salt)s::text || %(bell)s::text, 0)) ELSE true END AS sleeper)
SELECT CASE WHEN sleeper THEN pg_notify('dbqueue_' || to_hex(hashtextextended(%(salt)s::text || %(bell)s::text, 0)), '') END IS NOT NULL FROM ins
