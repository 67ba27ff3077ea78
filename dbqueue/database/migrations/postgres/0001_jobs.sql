-- Unfinished jobs. A finished job moves to {finished} in the statement that settles it, so claiming never pays for history.
CREATE TABLE {meta} (
    name text PRIMARY KEY,
    value text NOT NULL
);

CREATE TABLE {jobs} (
    id uuid PRIMARY KEY,
    task_id text,
    target text NOT NULL,
    fingerprint bytea,
    payload bytea NOT NULL,
    key text,
    queue text NOT NULL,
    priority smallint NOT NULL CHECK (priority BETWEEN 0 AND 9),  -- smaller is better: 9 minus what the caller said
    state smallint NOT NULL CHECK (state BETWEEN 0 AND 3),  -- 0 pending, 1 running, 2 blocked, 3 unknown
    run_at bigint NOT NULL,  -- every instant is UTC microseconds
    ready_at bigint,  -- when it became claimable; NULL while it waits for run_at, runs or is held
    queued_at bigint,  -- its ready_at when it was last claimed: it waited from there to started_at
    attempt integer NOT NULL DEFAULT 0,
    lapses integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL,
    timeout_ms integer,
    on_crash smallint NOT NULL DEFAULT 0,  -- 0 retry, 1 unknown, 2 fail
    token uuid,
    worker text,
    lease_until bigint,
    error_kind text,
    error_summary text,
    source text,
    sequence bigint,
    created_at bigint NOT NULL,
    started_at bigint,
    updated_at bigint NOT NULL,
    CONSTRAINT {prefix}running_has_lease CHECK ((state = 1) = (token IS NOT NULL AND lease_until IS NOT NULL)),
    CONSTRAINT {prefix}ready_is_pending CHECK (ready_at IS NULL OR state = 0)
) WITH (
    fillfactor = 70,
    -- Every row is rewritten by claim and deleted by settle: without these, dead rows wait for the once-a-minute default.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 20000
);

-- Holds claimable jobs and nothing else: neither a million waiting jobs nor running ones are in the way of a claim.
CREATE INDEX {prefix}jobs_claim ON {jobs} (queue, priority, ready_at, id) WHERE ready_at IS NOT NULL;
CREATE INDEX {prefix}jobs_waiting ON {jobs} (run_at, id) WHERE state = 0 AND ready_at IS NULL;
CREATE INDEX {prefix}jobs_lease ON {jobs} (lease_until) WHERE state = 1;
CREATE UNIQUE INDEX {prefix}jobs_key ON {jobs} (target, key) WHERE key IS NOT NULL AND state IN (0, 1, 3);
CREATE INDEX {prefix}jobs_task ON {jobs} (task_id) WHERE task_id IS NOT NULL;

CREATE TABLE {finished} (
    id uuid NOT NULL,
    task_id text,
    target text NOT NULL,
    fingerprint bytea,
    payload bytea,  -- NULL: not kept (jobs that succeeded, unless asked for)
    key text,
    queue text NOT NULL,
    priority smallint NOT NULL,
    state smallint NOT NULL CHECK (state BETWEEN 4 AND 8),  -- 4 succeeded, 5 acked, 6 dead, 7 cancelled, 8 discarded
    run_at bigint NOT NULL,
    attempt integer NOT NULL,
    lapses integer NOT NULL,
    max_attempts integer NOT NULL,
    timeout_ms integer,
    on_crash smallint NOT NULL,
    token uuid,  -- kept: a settle whose COMMIT answer was lost is told "already"
    worker text,
    error_kind text,
    error_summary text,
    source text,
    sequence bigint,
    created_at bigint NOT NULL,
    started_at bigint,
    finished_at bigint NOT NULL,
    PRIMARY KEY (id, finished_at)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX {prefix}finished_prune ON {finished} (state, finished_at);
CREATE INDEX {prefix}finished_task ON {finished} (task_id) WHERE task_id IS NOT NULL;

-- For people: the same record with readable times and states, finished or not.
CREATE VIEW {view} AS
SELECT id, task_id, target, key, queue, 9 - priority AS priority,
       (ARRAY['pending', 'running', 'blocked', 'unknown'])[state + 1] AS state,
       to_timestamp(run_at / 1000000.0) AS run_at, ready_at IS NOT NULL AS ready, attempt, max_attempts, lapses, timeout_ms, worker,
       to_timestamp(lease_until / 1000000.0) AS lease_until, error_kind, error_summary,
       to_timestamp(created_at / 1000000.0) AS created_at, to_timestamp(started_at / 1000000.0) AS started_at,
       NULL::timestamptz AS finished_at
FROM {jobs}
UNION ALL
SELECT id, task_id, target, key, queue, 9 - priority,
       (ARRAY['succeeded', 'acked', 'dead', 'cancelled', 'discarded'])[state - 3],
       to_timestamp(run_at / 1000000.0), false, attempt, max_attempts, lapses, timeout_ms, worker,
       NULL, error_kind, error_summary,
       to_timestamp(created_at / 1000000.0), to_timestamp(started_at / 1000000.0), to_timestamp(finished_at / 1000000.0)
FROM {finished};
