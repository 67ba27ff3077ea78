UPDATE "dbqueue_jobs" SET state = 0, token = NULL, lease_until = NULL, attempt = attempt - 1, ready_at = :now, updated_at = :now
WHERE state = 1 AND worker = :worker AND id = :id
