INSERT INTO "dbqueue_chord_parts" (group_id, task_id, part, meta) VALUES (:group_id, :task_id, :part, :meta) ON CONFLICT DO NOTHING
