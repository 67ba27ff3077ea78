SELECT 1 FROM "public"."dbqueue_jobs" WHERE id = %(id)s::uuid UNION ALL SELECT 1 FROM "public"."dbqueue_finished" WHERE id = %(id)s::uuid LIMIT 1
