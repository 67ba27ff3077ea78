SELECT id FROM "dbqueue_jobs" WHERE id = :id UNION ALL
SELECT id FROM "dbqueue_jobs" WHERE target = :target AND key = :key AND key IS NOT NULL AND state IN (0, 1, 3)
