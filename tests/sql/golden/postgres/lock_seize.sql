SELECT token FROM "public"."dbqueue_locks" WHERE name = %(name)s FOR UPDATE
