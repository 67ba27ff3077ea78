WITH clock AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now)
SELECT c.now,
  EXISTS (SELECT 1 FROM "public"."dbqueue_jobs" WHERE state = 0 AND ready_at IS NULL AND run_at >= %(waiting)s::bigint AND run_at <= c.now),
  EXISTS (SELECT 1 FROM "public"."dbqueue_jobs" WHERE state = 1 AND lease_until >= %(lease)s::bigint AND lease_until <= c.now),
  EXISTS (SELECT 1 FROM unnest(%(queues)s::text[]) q(queue)
    CROSS JOIN LATERAL (SELECT 1 FROM "public"."dbqueue_jobs" j WHERE j.queue = q.queue AND j.ready_at IS NOT NULL LIMIT 1) one),
  (SELECT run_at FROM "public"."dbqueue_jobs" WHERE state = 0 AND ready_at IS NULL AND run_at > c.now ORDER BY run_at, id LIMIT 1)
FROM clock c
