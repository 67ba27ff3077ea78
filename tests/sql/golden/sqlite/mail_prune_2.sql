DELETE FROM "dbqueue_mail" WHERE id > :after AND id <= :last AND expires_at <= (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset)
