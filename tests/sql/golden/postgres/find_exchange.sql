SELECT type, durable, auto_delete, arguments FROM "public"."dbqueue_exchanges" WHERE name = %(name)s
