DELETE FROM "dbqueue_bindings" WHERE queue = :name
