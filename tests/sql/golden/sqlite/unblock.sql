UPDATE "dbqueue_jobs" SET state = 0, run_at = :now, ready_at = :now, updated_at = :now,
  token = NULL, attempt = CASE WHEN attempt >= max_attempts THEN 0 ELSE attempt END
WHERE id = :id AND state = 2 AND NOT EXISTS (SELECT 1 FROM "dbqueue_jobs" k
  WHERE k.target = "dbqueue_jobs".target AND k.key = "dbqueue_jobs".key AND k.key IS NOT NULL AND k.state IN (0, 1, 3))
