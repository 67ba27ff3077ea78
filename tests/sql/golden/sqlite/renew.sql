UPDATE "dbqueue_jobs" SET lease_until = :until, updated_at = :now WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now
