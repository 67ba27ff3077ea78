SELECT EXISTS (SELECT 1 FROM unnest(%(queues)s::text[]) q(queue)
  CROSS JOIN LATERAL (SELECT 1 FROM "public"."dbqueue_jobs" j WHERE j.queue = q.queue AND j.ready_at IS NOT NULL
    ORDER BY j.priority, j.ready_at, j.id LIMIT 1) one)
