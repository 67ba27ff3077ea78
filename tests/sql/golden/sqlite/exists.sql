SELECT 1 FROM "dbqueue_jobs" WHERE id = :id UNION ALL SELECT 1 FROM "dbqueue_finished" WHERE id = :id LIMIT 1
