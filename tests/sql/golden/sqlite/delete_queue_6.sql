DELETE FROM "dbqueue_jobs" WHERE state = 0 AND id IN ( SELECT id FROM "dbqueue_jobs" WHERE queue = :name AND state = 0 AND ready_at IS NULL AND head IS NOT NULL ORDER BY run_at, id LIMIT 100 )
