UPDATE "dbqueue_chords" SET returned = returned + :counted WHERE group_id = :group_id
