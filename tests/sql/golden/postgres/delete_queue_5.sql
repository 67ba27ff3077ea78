DELETE FROM "public"."dbqueue_jobs" WHERE id IN (SELECT id FROM "public"."dbqueue_jobs" WHERE queue = %(name)s AND ready_at IS NOT NULL AND head IS NOT NULL ORDER BY priority, ready_at, id LIMIT 100)
