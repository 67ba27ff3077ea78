SELECT name FROM "public"."dbqueue_schedules" WHERE owner = %(owner)s AND last_slot > %(late)s AND paused = %(no)s AND retired = %(no)s ORDER BY name LIMIT 20
