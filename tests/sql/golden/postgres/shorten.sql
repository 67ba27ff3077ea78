WITH before AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now),
ahead AS MATERIALIZED (SELECT id FROM "public"."dbqueue_jobs" WHERE state = 1 AND updated_at > (SELECT now FROM before) FOR NO KEY UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now FROM ahead)
UPDATE "public"."dbqueue_jobs" j SET lease_until = c.now + (j.lease_until - j.updated_at), updated_at = c.now
FROM clock c WHERE j.id = ANY(ARRAY(SELECT id FROM ahead)) AND j.state = 1 AND j.updated_at > c.now
