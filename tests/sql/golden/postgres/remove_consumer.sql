DELETE FROM "public"."dbqueue_consumers" WHERE tag = %(tag)s
