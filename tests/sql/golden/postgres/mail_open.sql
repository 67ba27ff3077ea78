INSERT INTO "public"."dbqueue_cursors" (queue, position) SELECT %(queue)s, COALESCE(max(id), 0) FROM "public"."dbqueue_mail" WHERE 1 = 1 ON CONFLICT (queue) DO NOTHING
