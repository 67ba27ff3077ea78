SELECT id FROM "public"."dbqueue_jobs" WHERE task_id = %(task_id)s AND state = 0 AND head IS NOT NULL
