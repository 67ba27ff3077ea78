DELETE FROM "public"."dbqueue_locks" WHERE name = %(name)s AND token = %(token)s
