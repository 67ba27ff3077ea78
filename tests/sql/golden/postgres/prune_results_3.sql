SELECT group_id FROM "public"."dbqueue_chords" WHERE expires_at <= %(now)s ORDER BY expires_at LIMIT 100 FOR UPDATE SKIP LOCKED
