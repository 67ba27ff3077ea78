UPDATE "public"."dbqueue_queues" SET used_at = ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) WHERE name = %(name)s AND expires_ms IS NOT NULL
