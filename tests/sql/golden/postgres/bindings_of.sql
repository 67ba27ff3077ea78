SELECT b.exchange, COALESCE(e.type, 'direct'), b.routing_key FROM "public"."dbqueue_bindings" b LEFT JOIN "public"."dbqueue_exchanges" e ON e.name = b.exchange WHERE b.queue = %(queue)s
