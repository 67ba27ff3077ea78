UPDATE "dbqueue_queues" SET consumed = :yes WHERE name = :queue AND NOT consumed
