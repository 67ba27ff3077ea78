UPDATE "dbqueue_jobs" SET state = :state, token = NULL, lease_until = NULL, lapses = lapses + 1, error_kind = 'crashed', error_summary = NULL,
  ready_at = CASE WHEN :state = 0 THEN :now END, updated_at = :now WHERE id = :id
