DELETE FROM "public"."dbqueue_results" WHERE task_id = %(task_id)s
