WITH t AS MATERIALIZED (SELECT ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now)
UPDATE "public"."dbqueue_schedules" s SET last_slot = a.last_slot, next_at = a.next_at, planned = s.spec || ' ' || s.timezone,
  fired = s.fired + a.fired, fired_at = CASE WHEN a.fired > 0 THEN t.now ELSE s.fired_at END, error = a.error, updated_at = t.now
FROM unnest(%(owners)s::text[], %(names)s::text[], %(was)s::bigint[], %(last_slots)s::bigint[], %(next_ats)s::bigint[],
  %(fired)s::bigint[], %(errors)s::text[]) AS a(owner, name, was, last_slot, next_at, fired, error), t
WHERE s.owner = a.owner AND s.name = a.name AND s.last_slot = a.was
