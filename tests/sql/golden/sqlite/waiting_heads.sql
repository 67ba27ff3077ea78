SELECT id, head FROM "dbqueue_jobs" WHERE id > :after AND state = 0 AND COALESCE(task_id, '') <> '' AND instr(head, :part) > 0 ORDER BY id LIMIT 100
