WITH mine AS MATERIALIZED (SELECT id, lease_until FROM "public"."dbqueue_jobs" WHERE state = 1 AND worker = %(worker)s::text
  AND (id, token) NOT IN (SELECT k.id, k.token FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) k(id, token))
  FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now FROM mine)
UPDATE "public"."dbqueue_jobs" j SET state = 0, token = NULL, lease_until = NULL, attempt = attempt - 1,
  ready_at = (SELECT now FROM clock), updated_at = (SELECT now FROM clock)
WHERE j.id = ANY(ARRAY(SELECT m.id FROM clock c CROSS JOIN mine m WHERE m.lease_until > c.now))
