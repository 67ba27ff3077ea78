SELECT task_id, state, meta FROM "dbqueue_results" WHERE task_id IN (:v0) AND (expires_at IS NULL OR expires_at > (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset))
