SELECT id, token, state FROM "public"."dbqueue_finished" WHERE id = ANY(%(ids)s::uuid[])
