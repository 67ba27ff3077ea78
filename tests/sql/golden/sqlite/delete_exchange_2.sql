DELETE FROM "dbqueue_bindings" WHERE exchange = :name
