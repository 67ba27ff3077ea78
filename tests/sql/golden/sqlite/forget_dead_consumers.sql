DELETE FROM "dbqueue_consumers" WHERE alive_until + :grace <= (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset)
