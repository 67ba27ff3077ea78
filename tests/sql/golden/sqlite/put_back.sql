UPDATE "dbqueue_jobs" SET state = :state, lease_until = NULL, attempt = attempt - :refund, lapses = lapses + (:kind IS 'crashed'),
  payload = COALESCE(:payload, payload), max_attempts = max_attempts + (:payload IS NOT NULL),
  error_kind = COALESCE(:kind, error_kind), error_summary = CASE WHEN :kind IS NULL THEN error_summary ELSE :summary END,
  run_at = CASE WHEN :state = 0 AND :delay >= 0 AND (:refund = 0 OR :delay > 0) THEN :now + :delay ELSE run_at END,
  ready_at = CASE WHEN :state = 0 AND :delay = 0 THEN :now WHEN :state = 0 AND :delay < 0 THEN COALESCE(queued_at, :now) END,
  updated_at = :now
WHERE id = :id AND token = :token AND state = 1 AND lease_until > :now
