UPDATE "dbqueue_jobs" SET lease_until = :until WHERE id = :id
