INSERT INTO "public"."dbqueue_locks" AS held (name, token, owner, until) VALUES (%(name)s, %(token)s, %(owner)s, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) + %(ttl)s)
ON CONFLICT (name) DO UPDATE SET token = excluded.token, owner = excluded.owner, until = ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) + %(ttl)s
WHERE held.until <= ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) OR held.token = excluded.token
