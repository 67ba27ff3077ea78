INSERT INTO "dbqueue_exchanges" (name, type, durable, auto_delete, arguments) VALUES (:name, :type, :durable, :auto_delete, :arguments) ON CONFLICT (name) DO NOTHING
