WITH ins AS (INSERT INTO "public"."dbqueue_chord_parts" (group_id, task_id, part, meta)
  VALUES (%(group_id)s::text, %(task_id)s::text, %(part)s::integer, %(meta)s::bytea) ON CONFLICT DO NOTHING RETURNING 1)
UPDATE "public"."dbqueue_chords" SET returned = returned + (SELECT count(*) FROM ins) WHERE group_id = %(group_id)s::text RETURNING returned, size + extra
