WITH asked AS MATERIALIZED (
  SELECT * FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[], %(states)s::smallint[], %(kinds)s::text[], %(summaries)s::text[],
    %(delays)s::bigint[], %(refunds)s::integer[], %(payloads)s::bytea[])
    AS a(id, token, state, error_kind, error_summary, delay, refund, payload)),
locked AS MATERIALIZED (
  SELECT j.id, j.token, j.state, j.lease_until FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(%(ids)s::uuid[]) ORDER BY j.id FOR UPDATE SKIP LOCKED),
clock AS MATERIALIZED (SELECT count(*) AS locked, ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint + %(offset)s::bigint) AS now FROM locked),
owned AS MATERIALIZED (
  SELECT a.*, c.now FROM clock c CROSS JOIN locked l JOIN asked a USING (id)
  WHERE l.state = 1 AND l.token = a.token AND l.lease_until > c.now),
gone AS (DELETE FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(ARRAY(SELECT id FROM owned WHERE state > 3)) RETURNING j.id, j.task_id, j.target, j.fingerprint, j.payload, j.key, j.queue, j.priority, j.run_at, j.attempt, j.lapses, j.max_attempts, j.timeout_ms, j.on_crash, j.token, j.worker, j.error_kind, j.error_summary, j.source, j.sequence, j.created_at, j.started_at, j.head, j.expires_at),
again AS (UPDATE "public"."dbqueue_jobs" j SET state = o.state, lease_until = NULL, attempt = j.attempt - o.refund,
    lapses = j.lapses + CASE WHEN o.error_kind = 'crashed' THEN 1 ELSE 0 END,
    payload = COALESCE(o.payload, j.payload), max_attempts = j.max_attempts + CASE WHEN o.payload IS NULL THEN 0 ELSE 1 END,
    error_kind = COALESCE(o.error_kind, j.error_kind),
    error_summary = CASE WHEN o.error_kind IS NULL THEN j.error_summary ELSE o.error_summary END,
    run_at = CASE WHEN o.state = 0 AND o.delay >= 0 AND (o.refund = 0 OR o.delay > 0) THEN o.now + o.delay ELSE j.run_at END,
    ready_at = CASE WHEN o.state = 0 AND o.delay = 0 THEN o.now WHEN o.state = 0 AND o.delay < 0 THEN COALESCE(j.queued_at, o.now) END,
    updated_at = o.now
  FROM owned o WHERE o.state <= 3 AND j.id = o.id AND j.id = ANY(ARRAY(SELECT id FROM owned WHERE state <= 3)) RETURNING j.id),
kept AS (INSERT INTO "public"."dbqueue_finished" (id, task_id, target, fingerprint, key, queue, priority, run_at, attempt, lapses, max_attempts, timeout_ms, on_crash, token, worker, error_kind, error_summary, source, sequence, created_at, started_at, head, expires_at, payload, state, finished_at)
  SELECT g.id, g.task_id, g.target, g.fingerprint, g.key, g.queue, g.priority, g.run_at, g.attempt, g.lapses, g.max_attempts, g.timeout_ms, g.on_crash, g.token, g.worker, o.error_kind, o.error_summary, g.source, g.sequence, g.created_at, g.started_at, g.head, g.expires_at,
    CASE WHEN o.state NOT IN (4, 5) OR %(keep)s::boolean THEN g.payload END, o.state, o.now
  FROM gone g JOIN owned o USING (id) RETURNING id),
still AS MATERIALIZED (SELECT j.id, j.token FROM "public"."dbqueue_jobs" j WHERE j.id = ANY(%(ids)s::uuid[]))
SELECT a.id, a.token, CASE WHEN k.id IS NOT NULL THEN 'done'
  WHEN r.id IS NOT NULL THEN CASE WHEN a.state = 0 THEN 'again' ELSE 'done' END
  WHEN l.id IS NOT NULL THEN CASE WHEN l.token = a.token AND l.state = a.state THEN 'already' ELSE 'lost' END
  WHEN s.token = a.token THEN 'busy' ELSE 'lost' END AS fact
FROM asked a LEFT JOIN owned o ON o.id = a.id AND o.token = a.token
LEFT JOIN kept k ON k.id = o.id LEFT JOIN again r ON r.id = o.id LEFT JOIN locked l ON l.id = a.id LEFT JOIN still s ON s.id = a.id
