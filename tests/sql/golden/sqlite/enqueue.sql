INSERT INTO "dbqueue_jobs" (id, task_id, target, fingerprint, payload, key, queue, priority, state, run_at, ready_at, max_attempts, timeout_ms, on_crash, source, sequence, head, expires_at, created_at, updated_at)
SELECT :id, :task_id, :target, :fingerprint, :payload, :key, :queue, :priority, 0, COALESCE(:run_at, now + :delay),
  CASE WHEN COALESCE(:run_at, now + :delay) <= now THEN now END,
  :max_attempts, :timeout_ms, :on_crash, :source, :sequence, :head, now + :ttl, now, now
FROM (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset AS now)
WHERE :database_id IS NULL OR EXISTS (SELECT 1 FROM "dbqueue_meta" WHERE name = 'database_id' AND value = :database_id)
ON CONFLICT DO NOTHING
