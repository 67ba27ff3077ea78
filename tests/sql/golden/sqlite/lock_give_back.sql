DELETE FROM "dbqueue_locks" WHERE name = :name AND token = :token AND until > (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset)
