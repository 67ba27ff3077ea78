INSERT INTO "dbqueue_cursors" (queue, position) SELECT :queue, COALESCE(max(id), 0) FROM "dbqueue_mail" WHERE 1 = 1 ON CONFLICT (queue) DO NOTHING
