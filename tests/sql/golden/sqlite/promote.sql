UPDATE "dbqueue_jobs" SET ready_at = :now, updated_at = :now WHERE id IN (
  SELECT id FROM "dbqueue_jobs" WHERE state = 0 AND ready_at IS NULL AND run_at <= :now ORDER BY run_at, id LIMIT :limit)
  AND state = 0 AND ready_at IS NULL
