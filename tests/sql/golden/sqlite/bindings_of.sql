SELECT b.exchange, COALESCE(e.type, 'direct'), b.routing_key FROM "dbqueue_bindings" b LEFT JOIN "dbqueue_exchanges" e ON e.name = b.exchange WHERE b.queue = :queue
