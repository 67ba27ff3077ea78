SELECT now, EXISTS (SELECT 1 FROM "dbqueue_jobs" WHERE state = 0 AND ready_at IS NULL AND run_at <= now),
  EXISTS (SELECT 1 FROM "dbqueue_jobs" WHERE state = 1 AND lease_until <= now),
  (SELECT min(run_at) FROM "dbqueue_jobs" WHERE state = 0 AND ready_at IS NULL), (SELECT min(lease_until) FROM "dbqueue_jobs" WHERE state = 1)
FROM (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset AS now)
