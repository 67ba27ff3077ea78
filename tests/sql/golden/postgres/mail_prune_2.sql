DELETE FROM "public"."dbqueue_mail" WHERE id > %(after)s AND id <= %(last)s AND expires_at <= ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint)
