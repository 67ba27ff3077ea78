SELECT public.dbqueue_jobs.state AS state, count(*) AS n 
FROM public.dbqueue_jobs 
WHERE public.dbqueue_jobs.queue = %(queue_1)s::VARCHAR GROUP BY public.dbqueue_jobs.state UNION ALL SELECT public.dbqueue_finished.state AS state, count(*) AS n 
FROM public.dbqueue_finished 
WHERE public.dbqueue_finished.queue = %(queue_2)s::VARCHAR GROUP BY public.dbqueue_finished.state
