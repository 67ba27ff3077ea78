DELETE FROM "dbqueue_finished" WHERE id = :id AND finished_at = :finished_at
