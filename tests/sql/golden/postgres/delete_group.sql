DELETE FROM "public"."dbqueue_groups" WHERE group_id = %(group_id)s
