DELETE FROM "dbqueue_exchanges" WHERE name = :name AND NOT EXISTS (SELECT 1 FROM "dbqueue_bindings" WHERE exchange = :name)
