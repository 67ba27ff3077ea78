DELETE FROM "dbqueue_locks" WHERE name = :name AND token = :token
