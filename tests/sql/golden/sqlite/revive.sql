INSERT INTO "dbqueue_jobs" (id, task_id, target, fingerprint, payload, key, queue, priority, max_attempts, timeout_ms, on_crash, error_kind, error_summary, source, sequence, created_at, head, expires_at, state, attempt, lapses, run_at, ready_at, updated_at)
SELECT id, task_id, target, fingerprint, payload, key, queue, priority, max_attempts, timeout_ms, on_crash, error_kind, error_summary, source, sequence, created_at, head, expires_at, 0, 0, 0, :now, :now, :now FROM "dbqueue_finished" WHERE id = :id AND finished_at = :finished_at
ON CONFLICT DO NOTHING
