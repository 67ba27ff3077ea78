SELECT state, finished_at, payload IS NOT NULL FROM "dbqueue_finished" WHERE id = :id ORDER BY finished_at DESC LIMIT 1
