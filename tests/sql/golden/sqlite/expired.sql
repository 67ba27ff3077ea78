SELECT id, CASE WHEN on_crash = 1 THEN 3 WHEN on_crash = 2 OR attempt >= max_attempts THEN 6 ELSE 0 END, worker
FROM "dbqueue_jobs" WHERE state = 1 AND lease_until <= :now ORDER BY lease_until LIMIT :limit
