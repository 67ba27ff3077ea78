SELECT meta FROM "public"."dbqueue_groups" WHERE group_id = %(group_id)s AND (expires_at IS NULL OR expires_at > ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint))
