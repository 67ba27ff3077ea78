DELETE FROM "public"."dbqueue_cursors" WHERE queue = %(queue)s
