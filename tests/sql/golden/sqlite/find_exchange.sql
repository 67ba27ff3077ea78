SELECT type, durable, auto_delete, arguments FROM "dbqueue_exchanges" WHERE name = :name
