INSERT INTO "public"."dbqueue_cursors" (queue, position) VALUES (%(queue)s, 0) ON CONFLICT (queue) DO NOTHING
