SELECT group_id FROM "dbqueue_groups" WHERE expires_at <= :now ORDER BY expires_at LIMIT 100
