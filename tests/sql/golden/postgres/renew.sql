WITH asked AS MATERIALIZED (SELECT * FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS a(id, token)),
locked AS MATERIALIZED (
  SELECT j.id, j.token, j.state, j.lease_until FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(%(ids)s::uuid[])
  ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now FROM locked),
owned AS MATERIALIZED (
  SELECT a.id, a.token FROM clock c CROSS JOIN locked l JOIN asked a USING (id)
  WHERE l.state = 1 AND l.token = a.token AND l.lease_until > c.now),
renewed AS (UPDATE "public"."dbqueue_jobs" j SET lease_until = (SELECT now FROM clock) + %(lease)s::bigint, updated_at = (SELECT now FROM clock)
  WHERE j.id = ANY(ARRAY(SELECT id FROM owned)) RETURNING j.id),
still AS MATERIALIZED (SELECT j.id, j.token FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(%(ids)s::uuid[]))
SELECT a.id, a.token, CASE WHEN r.id IS NOT NULL THEN 'renewed' WHEN l.id IS NOT NULL THEN 'lost'
  WHEN s.token = a.token THEN 'busy' ELSE 'lost' END AS fact
FROM asked a LEFT JOIN owned o ON o.id = a.id AND o.token = a.token
LEFT JOIN renewed r ON r.id = o.id LEFT JOIN locked l ON l.id = a.id LEFT JOIN still s ON s.id = a.id
