UPDATE "dbqueue_jobs" SET lease_until = :now + (lease_until - updated_at), updated_at = :now
WHERE state = 1 AND lease_until > :now AND updated_at > :now
