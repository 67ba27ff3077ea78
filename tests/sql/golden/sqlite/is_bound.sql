SELECT 1 FROM "dbqueue_bindings" WHERE exchange = :exchange AND queue = :queue AND routing_key = :routing_key
