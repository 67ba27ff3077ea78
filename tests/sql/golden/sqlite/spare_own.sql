UPDATE "dbqueue_jobs" SET lease_until = :until WHERE state = 1 AND lease_until <= :soon AND worker = :worker
