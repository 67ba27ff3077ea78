SELECT id FROM "dbqueue_jobs" WHERE task_id = :task_id AND state = 0 AND head IS NOT NULL
