WITH clock AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now),
due AS MATERIALIZED (SELECT id, CASE WHEN on_crash = 1 THEN 3 WHEN on_crash = 2 OR attempt >= max_attempts THEN 6 ELSE 0 END AS next
  FROM "public"."dbqueue_jobs" WHERE state = 1 AND lease_until >= %(mark)s::bigint AND lease_until <= (SELECT now FROM clock)
  ORDER BY lease_until LIMIT 500 FOR UPDATE SKIP LOCKED),
back AS (UPDATE "public"."dbqueue_jobs" j SET state = d.next, token = NULL, lease_until = NULL, lapses = j.lapses + 1, error_kind = 'crashed',
    error_summary = NULL, ready_at = CASE WHEN d.next = 0 THEN (SELECT now FROM clock) END, updated_at = (SELECT now FROM clock)
  FROM due d WHERE d.next <> 6 AND j.id = d.id AND j.id = ANY(ARRAY(SELECT id FROM due WHERE next <> 6)) RETURNING j.queue, j.state),
gone AS (DELETE FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(ARRAY(SELECT id FROM due WHERE next = 6)) RETURNING j.id, j.task_id, j.target, j.fingerprint, j.payload, j.key, j.queue, j.priority, j.run_at, j.attempt, j.lapses, j.max_attempts, j.timeout_ms, j.on_crash, j.token, j.worker, j.error_kind, j.error_summary, j.source, j.sequence, j.created_at, j.started_at, j.head, j.expires_at),
kept AS (INSERT INTO "public"."dbqueue_finished" (id, task_id, target, fingerprint, key, queue, priority, run_at, attempt, lapses, max_attempts, timeout_ms, on_crash, token, worker, error_kind, error_summary, source, sequence, created_at, started_at, head, expires_at, payload, state, finished_at)
  SELECT g.id, g.task_id, g.target, g.fingerprint, g.key, g.queue, g.priority, g.run_at, g.attempt, g.lapses + 1, g.max_attempts, g.timeout_ms, g.on_crash, NULL, g.worker, 'crashed', NULL, g.source, g.sequence, g.created_at, g.started_at, g.head, g.expires_at,
    g.payload, 6, (SELECT now FROM clock) FROM gone g RETURNING id),
queues AS MATERIALIZED (SELECT queue, count(*) AS n FROM back WHERE state = 0 GROUP BY queue)
SELECT (SELECT now FROM clock), COALESCE((SELECT sum(n) FROM queues), 0)::bigint, (SELECT count(*) FROM kept),
  (SELECT count(*) FROM back WHERE state = 3),
  (SELECT count(*) FROM queues WHERE CASE WHEN true THEN CASE WHEN CASE WHEN pg_try_advisory_lock(hashtextextended(%(salt)s::text || queues.queue, 0)) THEN NOT pg_advisory_unlock(hashtextextended(%(salt)s::text || queues.queue, 0)) ELSE true END THEN pg_notify('dbqueue_' || to_hex(hashtextextended(%(salt)s::text || queues.queue, 0)), '') IS NOT NULL END END)
