SELECT id, head FROM "public"."dbqueue_jobs" WHERE id > %(after)s AND state = 0 AND COALESCE(task_id, '') <> '' AND pg_catalog."position"(head, %(part)s) > 0 ORDER BY id LIMIT 100
