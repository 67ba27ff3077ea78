DELETE FROM "public"."dbqueue_exchanges" WHERE name = %(name)s AND NOT EXISTS (SELECT 1 FROM "public"."dbqueue_bindings" WHERE exchange = %(name)s)
