SELECT message_ttl_ms, brief, durable FROM "dbqueue_queues" WHERE name = :name
