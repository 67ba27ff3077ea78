INSERT INTO "dbqueue_bindings" (exchange, queue, routing_key) VALUES (:exchange, :queue, :routing_key) ON CONFLICT (exchange, queue, routing_key) DO NOTHING
