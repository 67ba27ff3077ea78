WITH clock AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now),
due AS MATERIALIZED (SELECT id FROM "public"."dbqueue_jobs" WHERE state = 0 AND ready_at IS NULL AND run_at >= %(mark)s::bigint
  AND run_at <= (SELECT now FROM clock) ORDER BY run_at, id LIMIT 500 FOR UPDATE SKIP LOCKED),
moved AS (UPDATE "public"."dbqueue_jobs" j SET ready_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
  WHERE j.id = ANY(ARRAY(SELECT id FROM due)) AND j.state = 0 AND j.ready_at IS NULL RETURNING j.queue),
queues AS MATERIALIZED (SELECT queue, count(*) AS n FROM moved GROUP BY queue)
SELECT (SELECT now FROM clock), COALESCE((SELECT sum(n) FROM queues), 0)::bigint,
  (SELECT run_at FROM "public"."dbqueue_jobs" WHERE state = 0 AND ready_at IS NULL AND run_at > (SELECT now FROM clock) ORDER BY run_at, id LIMIT 1),
  (SELECT count(*) FROM queues WHERE CASE WHEN true THEN CASE WHEN CASE WHEN pg_try_advisory_lock(hashtextextended(%(salt)s::text || queues.queue, 0)) THEN NOT pg_advisory_unlock(hashtextextended(%(salt)s::text || queues.queue, 0)) ELSE true END THEN pg_notify('dbqueue_' || to_hex(hashtextextended(%(salt)s::text || queues.queue, 0)), '') IS NOT NULL END END)
