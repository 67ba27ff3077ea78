SELECT queue, exchange, routing_key FROM "dbqueue_bindings"
