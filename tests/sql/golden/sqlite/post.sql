INSERT INTO "dbqueue_mail" (exchange, routing_key, head, payload, expires_at)
VALUES (:exchange, :routing_key, :head, :payload, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset + :ttl)
