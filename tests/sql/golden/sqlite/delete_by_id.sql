DELETE FROM "dbqueue_jobs" WHERE id = :id
