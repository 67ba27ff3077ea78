DELETE FROM "public"."dbqueue_jobs" WHERE id IN (SELECT id FROM "public"."dbqueue_jobs" WHERE queue = %(name)s AND state = 0 AND ready_at IS NULL AND head IS NOT NULL ORDER BY run_at, id LIMIT 100)
