INSERT INTO "dbqueue_chords" (group_id, expires_at) VALUES (:group_id, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset + :ttl)
ON CONFLICT (group_id) DO UPDATE SET expires_at = excluded.expires_at
