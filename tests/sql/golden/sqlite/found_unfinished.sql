SELECT state, updated_at, queue FROM "dbqueue_jobs" WHERE id = :id
