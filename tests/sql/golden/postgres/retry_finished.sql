WITH clock AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now),
last AS MATERIALIZED (SELECT * FROM "public"."dbqueue_finished" WHERE id = %(id)s::uuid ORDER BY finished_at DESC LIMIT 1 FOR UPDATE),
ins AS (INSERT INTO "public"."dbqueue_jobs" (id, task_id, target, fingerprint, payload, key, queue, priority, max_attempts, timeout_ms, on_crash, error_kind, error_summary, source, sequence, created_at, head, expires_at, state, attempt, lapses, run_at, ready_at, updated_at)
  SELECT id, task_id, target, fingerprint, payload, key, queue, priority, max_attempts, timeout_ms, on_crash, error_kind, error_summary, source, sequence, created_at, head, expires_at, 0, 0, 0, clock.now, clock.now, clock.now FROM last, clock WHERE last.state IN (4, 5, 6, 7) AND payload IS NOT NULL
  ON CONFLICT DO NOTHING RETURNING id),
del AS (DELETE FROM "public"."dbqueue_finished" f USING last WHERE f.id = last.id AND f.finished_at = last.finished_at
  AND f.id IN (SELECT id FROM ins) RETURNING f.id)
SELECT last.state, last.payload IS NOT NULL, EXISTS (SELECT 1 FROM del), last.queue FROM last
