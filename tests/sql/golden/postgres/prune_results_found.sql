DELETE FROM "public"."dbqueue_results" WHERE task_id = ANY(%(values)s::text[])
