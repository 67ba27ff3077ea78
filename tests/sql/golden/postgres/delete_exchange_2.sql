DELETE FROM "public"."dbqueue_bindings" WHERE exchange = %(name)s
