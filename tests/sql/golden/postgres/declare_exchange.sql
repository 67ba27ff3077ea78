INSERT INTO "public"."dbqueue_exchanges" (name, type, durable, auto_delete, arguments) VALUES (%(name)s, %(type)s, %(durable)s, %(auto_delete)s, %(arguments)s) ON CONFLICT (name) DO NOTHING
