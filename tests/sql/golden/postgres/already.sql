SELECT id, token, state FROM "public"."dbqueue_finished" WHERE id = ANY(ARRAY(SELECT unnest(%(ids)s::uuid[])))
