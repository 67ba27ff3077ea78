SELECT id FROM "dbqueue_jobs" WHERE state = 1 AND worker = :worker
