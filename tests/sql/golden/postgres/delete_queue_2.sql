DELETE FROM "public"."dbqueue_consumers" WHERE queue = %(name)s
