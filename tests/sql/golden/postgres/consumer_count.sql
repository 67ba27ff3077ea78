SELECT count(*) FROM "public"."dbqueue_consumers" WHERE queue = %(queue)s AND alive_until > ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint)
