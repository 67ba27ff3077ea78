UPDATE "public"."dbqueue_schedules" SET paused = %(yes)s, updated_at = ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) WHERE owner = %(owner)s AND name = %(name)s
