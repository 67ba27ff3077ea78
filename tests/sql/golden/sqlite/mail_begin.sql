INSERT INTO "dbqueue_cursors" (queue, position) VALUES (:queue, 0) ON CONFLICT (queue) DO NOTHING
