DELETE FROM "dbqueue_jobs" WHERE state = 0 AND id IN ( SELECT id FROM "dbqueue_jobs" WHERE queue = :name AND ready_at IS NOT NULL AND head IS NOT NULL ORDER BY priority, ready_at, id LIMIT 100 )
