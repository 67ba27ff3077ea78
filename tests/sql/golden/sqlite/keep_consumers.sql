UPDATE "dbqueue_consumers" SET alive_until = (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset) + :alive WHERE worker = :worker
