SELECT message_ttl_ms, brief, durable FROM "public"."dbqueue_queues" WHERE name = %(name)s
