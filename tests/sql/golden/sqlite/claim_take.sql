UPDATE "dbqueue_jobs" SET state = 1, attempt = attempt + 1, token = :token, worker = :worker, lease_until = :lease_until, queued_at = ready_at,
  ready_at = NULL, started_at = :now, updated_at = :now WHERE id = :id AND ready_at IS NOT NULL
