DELETE FROM "dbqueue_groups" WHERE group_id = :group_id
