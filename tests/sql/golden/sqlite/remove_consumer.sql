DELETE FROM "dbqueue_consumers" WHERE tag = :tag
