SELECT id, task_id, target, fingerprint, payload, key, queue, priority, attempt + 1, lapses, max_attempts, timeout_ms, on_crash,
  head, expires_at, ready_at
FROM "dbqueue_jobs" WHERE queue = :queue AND ready_at IS NOT NULL ORDER BY priority, ready_at, id LIMIT :limit
