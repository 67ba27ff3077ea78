DELETE FROM "dbqueue_consumers" WHERE queue = :name
