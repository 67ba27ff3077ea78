SELECT dbqueue_jobs.state AS state, count(*) AS n 
FROM dbqueue_jobs 
WHERE dbqueue_jobs.queue = :queue_1 GROUP BY dbqueue_jobs.state UNION ALL SELECT dbqueue_finished.state AS state, count(*) AS n 
FROM dbqueue_finished 
WHERE dbqueue_finished.queue = :queue_2 GROUP BY dbqueue_finished.state
