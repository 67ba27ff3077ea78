WITH t AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now)
INSERT INTO "public"."dbqueue_jobs" (id, task_id, target, fingerprint, payload, key, queue, priority, state, run_at, ready_at, max_attempts, timeout_ms, on_crash, source, sequence, head, expires_at, created_at, updated_at)
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
