SELECT queue, exchange, routing_key FROM "public"."dbqueue_bindings"
