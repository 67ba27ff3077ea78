DELETE FROM "dbqueue_results" WHERE task_id = :task_id
