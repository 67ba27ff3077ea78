INSERT INTO "public"."dbqueue_bindings" (exchange, queue, routing_key) VALUES (%(exchange)s, %(queue)s, %(routing_key)s) ON CONFLICT (exchange, queue, routing_key) DO NOTHING
