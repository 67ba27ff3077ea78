WITH old AS MATERIALIZED (SELECT id, finished_at FROM "public"."dbqueue_finished"
  WHERE state = %(state)s::smallint AND finished_at < %(before)s::bigint ORDER BY finished_at LIMIT 1000 FOR UPDATE SKIP LOCKED)
DELETE FROM "public"."dbqueue_finished" f WHERE f.id = ANY(ARRAY(SELECT id FROM old)) AND (f.id, f.finished_at) IN (SELECT id, finished_at FROM old)
