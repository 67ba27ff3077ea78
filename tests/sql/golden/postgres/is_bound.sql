SELECT 1 FROM "public"."dbqueue_bindings" WHERE exchange = %(exchange)s AND queue = %(queue)s AND routing_key = %(routing_key)s
