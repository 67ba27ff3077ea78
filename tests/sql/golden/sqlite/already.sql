SELECT 1 FROM "dbqueue_jobs" WHERE id = :id AND token = :token AND state = :state UNION ALL
SELECT 1 FROM "dbqueue_finished" WHERE id = :id AND token = :token AND +state = :state
