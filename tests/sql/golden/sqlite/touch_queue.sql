UPDATE "dbqueue_queues" SET used_at = (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset) WHERE name = :name AND expires_ms IS NOT NULL
