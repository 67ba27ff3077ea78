SELECT 1 FROM "dbqueue_jobs" WHERE queue = :queue AND ready_at IS NOT NULL LIMIT 1
