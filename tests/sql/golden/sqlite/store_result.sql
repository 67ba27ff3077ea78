INSERT INTO "dbqueue_results" AS r (task_id, state, meta, expires_at, stored_at)
SELECT :task_id, :state, :meta, now + :ttl, now FROM (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset AS now) WHERE 1 = 1
ON CONFLICT (task_id) DO UPDATE SET state = excluded.state, meta = excluded.meta, expires_at = excluded.expires_at,
  stored_at = excluded.stored_at
WHERE r.state <> 'SUCCESS' OR r.expires_at <= excluded.stored_at
