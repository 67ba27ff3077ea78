DELETE FROM "dbqueue_finished" WHERE rowid IN (
  SELECT rowid FROM "dbqueue_finished" WHERE state = :state AND finished_at < :before ORDER BY finished_at LIMIT :limit)
