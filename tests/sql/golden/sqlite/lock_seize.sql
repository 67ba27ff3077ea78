SELECT token FROM "dbqueue_locks" WHERE name = :name
