WITH picked AS MATERIALIZED (
  SELECT p.id FROM unnest(%(queues)s::text[]) AS lane(queue)
  CROSS JOIN LATERAL (SELECT j.id FROM "public"."dbqueue_jobs" j WHERE j.queue = lane.queue AND j.ready_at IS NOT NULL
    ORDER BY j.priority, j.ready_at, j.id LIMIT 8 FOR UPDATE SKIP LOCKED) p
  LIMIT 8),
clock AS MATERIALIZED (SELECT count(*) AS locked, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now FROM picked),
taken AS (UPDATE "public"."dbqueue_jobs" j SET state = 1, attempt = j.attempt + 1, token = %(token)s::uuid, worker = %(worker)s::text,
    lease_until = (SELECT now FROM clock) + %(lease)s::bigint, queued_at = j.ready_at,
    ready_at = NULL, started_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
  WHERE j.id = ANY(ARRAY(SELECT id FROM picked)) AND j.state = 0
  RETURNING j.queued_at, j.id, j.task_id, j.target, j.fingerprint, j.payload, j.key, j.queue, j.priority, j.attempt, j.lapses, j.max_attempts, j.timeout_ms, j.on_crash, j.lease_until, j.head, j.expires_at)
SELECT c.now, t.* FROM clock c LEFT JOIN taken t ON true
