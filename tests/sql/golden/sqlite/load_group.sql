SELECT meta FROM "dbqueue_groups" WHERE group_id = :group_id AND (expires_at IS NULL OR expires_at > (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset))
