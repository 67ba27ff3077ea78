DELETE FROM "dbqueue_cursors" WHERE queue = :queue
