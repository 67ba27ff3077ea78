INSERT INTO "dbqueue_chords" AS c (group_id, expires_at) VALUES (:group_id, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset + :ttl)
ON CONFLICT (group_id) DO UPDATE SET expires_at = CASE WHEN c.done THEN c.expires_at ELSE excluded.expires_at END
