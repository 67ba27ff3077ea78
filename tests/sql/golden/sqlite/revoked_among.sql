SELECT task_id FROM "dbqueue_revoked" WHERE task_id IN (:t0, :t1, :t2, :t3) AND until > (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset)
