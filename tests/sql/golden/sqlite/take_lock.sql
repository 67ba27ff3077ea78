UPDATE "dbqueue_jobs" SET updated_at = updated_at WHERE id = :id
