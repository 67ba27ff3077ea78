INSERT INTO "dbqueue_locks" AS held (name, token, owner, until) VALUES (:name, :token, :owner, (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset) + :ttl)
ON CONFLICT (name) DO UPDATE SET token = excluded.token, owner = excluded.owner, until = (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset) + :ttl
WHERE held.until <= (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset) OR held.token = excluded.token
