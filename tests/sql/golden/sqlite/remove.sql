DELETE FROM "dbqueue_jobs" WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now
