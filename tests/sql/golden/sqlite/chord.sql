SELECT returned, size + extra, done FROM "dbqueue_chords" WHERE group_id = :group_id
