DELETE FROM "dbqueue_queues" WHERE name = :name
