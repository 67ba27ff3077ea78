WITH t AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now)
INSERT INTO "public"."dbqueue_chords" AS c (group_id, expires_at) SELECT %(group_id)s::text, t.now + %(ttl)s::bigint FROM t
ON CONFLICT (group_id) DO UPDATE SET expires_at = CASE WHEN c.done THEN c.expires_at ELSE excluded.expires_at END RETURNING done
