WITH locked AS MATERIALIZED (
  SELECT j.id, j.token, j.lease_until FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(%(ids)s::uuid[]) ORDER BY j.id FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now FROM locked),
gone AS (DELETE FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(ARRAY(
    SELECT l.id FROM clock c CROSS JOIN locked l JOIN unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) a(id, token)
      ON a.id = l.id AND a.token = l.token WHERE l.lease_until > c.now))
  RETURNING j.id, j.task_id, j.target, j.fingerprint, j.payload, j.key, j.queue, j.priority, j.run_at, j.attempt, j.lapses, j.max_attempts, j.timeout_ms, j.on_crash, j.token, j.worker, j.error_kind, j.error_summary, j.source, j.sequence, j.created_at, j.started_at, j.head, j.expires_at)
INSERT INTO "public"."dbqueue_finished" (id, task_id, target, fingerprint, key, queue, priority, run_at, attempt, lapses, max_attempts, timeout_ms, on_crash, token, worker, error_kind, error_summary, source, sequence, created_at, started_at, head, expires_at, payload, state, finished_at)
SELECT id, task_id, target, fingerprint, key, queue, priority, run_at, attempt, lapses, max_attempts, timeout_ms, on_crash, token, worker, NULL, NULL, source, sequence, created_at, started_at, head, expires_at, CASE WHEN %(keep)s::boolean THEN payload END, 4, (SELECT now FROM clock)
FROM gone
