DELETE FROM "public"."dbqueue_schedules" WHERE owner = %(owner)s AND name = %(name)s
