DELETE FROM "public"."dbqueue_consumers" WHERE alive_until + %(grace)s <= ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint)
