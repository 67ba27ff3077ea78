WITH turn AS MATERIALIZED (SELECT pg_advisory_xact_lock(hashtextextended('dbqueue.mail' || %(salt)s::text, 0))),
sent AS (INSERT INTO "public"."dbqueue_mail" (id, exchange, routing_key, head, payload, expires_at)
  SELECT nextval('"public"."dbqueue_mail_ids"'), %(exchange)s::text, %(routing_key)s::text, %(head)s::bytea, %(payload)s::bytea, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) + %(ttl)s::bigint
  FROM turn RETURNING id)
SELECT sent.id, CASE WHEN true THEN pg_notify('dbqueue_' || to_hex(hashtextextended(%(salt)s::text || q.queue, 0)), '') END IS NOT NULL
FROM sent CROSS JOIN unnest(%(queues)s::text[]) q(queue)
