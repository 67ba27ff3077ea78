WITH asked AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::uuid[], %(keys)s::text[], %(payloads)s::bytea[]) WITH ORDINALITY AS a(id, key, payload, n)),
t AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now),
ins AS (INSERT INTO "public"."dbqueue_jobs" (id, task_id, target, fingerprint, payload, key, queue, priority, state, run_at, ready_at, max_attempts, timeout_ms, on_crash, source, sequence, head, expires_at, created_at, updated_at)
  SELECT a.id, NULL, %(target)s::text, %(fingerprint)s::bytea, a.payload, a.key, %(queue)s::text, %(priority)s::smallint, 0,
    COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint),
    CASE WHEN COALESCE(%(run_at)s::bigint, t.now + %(delay)s::bigint) <= t.now THEN t.now END,
    %(max_attempts)s::integer, %(timeout_ms)s::integer, %(on_crash)s::smallint, %(source)s::text, %(sequence)s::bigint,
    %(head)s::bytea, t.now + %(ttl)s::bigint, t.now, t.now
  FROM asked a, t ORDER BY a.key, a.n
  ON CONFLICT DO NOTHING RETURNING id, key),
missing AS MATERIALIZED (SELECT count(*) < cardinality(%(ids)s::uuid[]) AS any_left FROM ins),
own AS MATERIALIZED (SELECT id FROM "public"."dbqueue_jobs" WHERE (SELECT any_left FROM missing) AND id = ANY(%(ids)s::uuid[])),
holders AS MATERIALIZED (SELECT id, key FROM "public"."dbqueue_jobs" WHERE (SELECT any_left FROM missing) AND target = %(target)s::text
  AND key = ANY(%(keys)s::text[]) AND key IS NOT NULL AND state IN (0, 1, 3))
SELECT a.n, COALESCE(i.id, o.id, s.id, h.id) AS id, i.id IS NULL AND o.id IS NULL AS duplicate
FROM asked a LEFT JOIN ins i ON i.id = a.id LEFT JOIN own o ON i.id IS NULL AND o.id = a.id
LEFT JOIN ins s ON i.id IS NULL AND s.key = a.key LEFT JOIN holders h ON i.id IS NULL AND h.key = a.key
ORDER BY a.n
