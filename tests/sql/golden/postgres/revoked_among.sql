SELECT task_id FROM "public"."dbqueue_revoked" WHERE task_id IN (%(t0)s, %(t1)s, %(t2)s, %(t3)s) AND until > ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint)
