WITH t AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now)
INSERT INTO "public"."dbqueue_jobs" (id, task_id, target, fingerprint, payload, key, queue, priority, state, run_at, ready_at, max_attempts, timeout_ms, on_crash, source, sequence, head, expires_at, created_at, updated_at)
SELECT a.id, NULL, a.target, a.fingerprint, a.payload, a.key, a.queue, a.priority, 0, t.now, t.now, a.max_attempts, a.timeout_ms,
  a.on_crash, a.source, a.sequence, NULL, NULL, t.now, t.now
FROM unnest(%(ids)s::uuid[], %(targets)s::text[], %(fingerprints)s::bytea[], %(payloads)s::bytea[], %(keys)s::text[], %(queues)s::text[],
  %(priorities)s::smallint[], %(max_attempts)s::integer[], %(timeouts)s::integer[], %(on_crash)s::smallint[], %(sources)s::text[],
  %(sequences)s::bigint[]) WITH ORDINALITY AS a(id, target, fingerprint, payload, key, queue, priority, max_attempts, timeout_ms,
  on_crash, source, sequence, n), t
ORDER BY a.target, a.key, a.n
ON CONFLICT DO NOTHING RETURNING id
