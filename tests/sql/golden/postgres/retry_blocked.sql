WITH clock AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now)
UPDATE "public"."dbqueue_jobs" j SET state = 0, run_at = (SELECT now FROM clock), ready_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock),
  token = NULL, attempt = CASE WHEN attempt >= max_attempts THEN 0 ELSE attempt END
WHERE j.id = %(id)s::uuid AND j.state = 2 AND NOT EXISTS (SELECT 1 FROM "public"."dbqueue_jobs" k
  WHERE k.target = j.target AND k.key = j.key AND k.key IS NOT NULL AND k.state IN (0, 1, 3))
RETURNING j.queue
