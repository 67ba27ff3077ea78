DELETE FROM "public"."dbqueue_queues" WHERE name = %(name)s
