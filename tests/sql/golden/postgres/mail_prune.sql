DELETE FROM "public"."dbqueue_mail" WHERE expires_at <= ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint)
