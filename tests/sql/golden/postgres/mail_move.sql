UPDATE "public"."dbqueue_cursors" SET position = %(to)s WHERE queue = %(queue)s AND position = %(at)s
