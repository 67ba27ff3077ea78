UPDATE "public"."dbqueue_consumers" SET alive_until = ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) + %(alive)s WHERE worker = %(worker)s
