DELETE FROM "public"."dbqueue_bindings" WHERE queue = %(name)s
