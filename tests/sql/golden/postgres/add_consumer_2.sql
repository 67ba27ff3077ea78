UPDATE "public"."dbqueue_queues" SET consumed = %(yes)s WHERE name = %(queue)s AND NOT consumed
