DELETE FROM "public"."dbqueue_locks" WHERE name = %(name)s AND token = %(token)s AND until > ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint)
