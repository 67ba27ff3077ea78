SELECT task_id FROM "dbqueue_results" WHERE expires_at <= :now ORDER BY expires_at LIMIT 100
