SELECT id, token FROM "dbqueue_jobs" WHERE state = 1 AND worker = :worker AND lease_until > :now
