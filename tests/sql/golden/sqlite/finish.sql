INSERT INTO "dbqueue_finished" (id, task_id, target, fingerprint, key, queue, priority, run_at, attempt, lapses, max_attempts, timeout_ms, on_crash, token, worker, source, sequence, created_at, started_at, payload, error_kind, error_summary, state, finished_at)
SELECT id, task_id, target, fingerprint, key, queue, priority, run_at, attempt, lapses, max_attempts, timeout_ms, on_crash, token, worker, source, sequence, created_at, started_at, CASE WHEN :keep THEN payload END, :kind, :summary, :state, :now FROM "dbqueue_jobs"
WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now
