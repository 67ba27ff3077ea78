CREATE VIEW "dbqueue_all_jobs" AS
SELECT hex(id) AS id, task_id, target, key, queue, 9 - priority AS priority,
       CASE state WHEN 0 THEN 'pending' WHEN 1 THEN 'running' WHEN 2 THEN 'blocked' ELSE 'unknown' END AS state,
       strftime('%Y-%m-%dT%H:%M:%fZ', run_at / 1000000.0, 'unixepoch') AS run_at, ready_at IS NOT NULL AS ready,
       attempt, max_attempts, lapses, timeout_ms, worker,
       strftime('%Y-%m-%dT%H:%M:%fZ', lease_until / 1000000.0, 'unixepoch') AS lease_until, error_kind, error_summary,
       strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000000.0, 'unixepoch') AS created_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', started_at / 1000000.0, 'unixepoch') AS started_at,
       NULL AS finished_at
FROM "dbqueue_jobs"
UNION ALL
SELECT hex(id), task_id, target, key, queue, 9 - priority,
       CASE state WHEN 4 THEN 'succeeded' WHEN 5 THEN 'acked' WHEN 6 THEN 'dead' WHEN 7 THEN 'cancelled' ELSE 'discarded' END,
       strftime('%Y-%m-%dT%H:%M:%fZ', run_at / 1000000.0, 'unixepoch'), 0,
       attempt, max_attempts, lapses, timeout_ms, worker,
       NULL, error_kind, error_summary,
       strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', started_at / 1000000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', finished_at / 1000000.0, 'unixepoch')
FROM "dbqueue_finished";

CREATE TABLE "dbqueue_bindings" (
    exchange TEXT NOT NULL,
    queue TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    PRIMARY KEY (exchange, queue, routing_key)
);

CREATE INDEX dbqueue_bindings_queue ON "dbqueue_bindings" (queue);

CREATE TABLE "dbqueue_chord_parts" (
    group_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    part INTEGER NOT NULL,  -- its place in the header; a redelivered part counts once
    meta BLOB NOT NULL,
    PRIMARY KEY (group_id, task_id, part)
);

CREATE TABLE "dbqueue_chords" (
    group_id TEXT NOT NULL PRIMARY KEY,
    size INTEGER,  -- null: not all parts are published yet
    extra INTEGER NOT NULL DEFAULT 0,  -- parts that were added by others (add_to_chord)
    returned INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    expires_at INTEGER
);

CREATE INDEX dbqueue_chords_expires ON "dbqueue_chords" (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE "dbqueue_consumers" (
    tag TEXT NOT NULL PRIMARY KEY,
    queue TEXT NOT NULL,
    worker TEXT NOT NULL,
    alive_until INTEGER NOT NULL  -- moved on by its process; a consumer that is past it died without a word
);

CREATE INDEX dbqueue_consumers_queue ON "dbqueue_consumers" (queue);

CREATE TABLE "dbqueue_exchanges" (
    name TEXT NOT NULL PRIMARY KEY,
    type TEXT NOT NULL,  -- direct, topic or fanout
    durable INTEGER NOT NULL,
    auto_delete INTEGER NOT NULL,
    arguments TEXT NOT NULL  -- JSON
);

CREATE TABLE "dbqueue_finished" (
    id BLOB NOT NULL,
    task_id TEXT,
    target TEXT NOT NULL,
    fingerprint BLOB,
    payload BLOB,  -- NULL: not kept (jobs that succeeded, unless asked for)
    key TEXT,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    state INTEGER NOT NULL CHECK (state BETWEEN 4 AND 8),  -- 4 succeeded, 5 acked, 6 dead, 7 cancelled, 8 discarded
    run_at INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    lapses INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    timeout_ms INTEGER,
    on_crash INTEGER NOT NULL,
    token BLOB,  -- kept: a settle whose COMMIT answer was lost is told "already"
    worker TEXT,
    error_kind TEXT,
    error_summary TEXT,
    source TEXT,
    sequence INTEGER,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER NOT NULL, head BLOB, expires_at INTEGER,
    PRIMARY KEY (id, finished_at)
);

CREATE INDEX dbqueue_finished_prune ON "dbqueue_finished" (state, finished_at);

CREATE INDEX dbqueue_finished_task ON "dbqueue_finished" (task_id) WHERE task_id IS NOT NULL;

CREATE TABLE "dbqueue_groups" (
    group_id TEXT NOT NULL PRIMARY KEY,
    meta BLOB NOT NULL,
    expires_at INTEGER
);

CREATE INDEX dbqueue_groups_expires ON "dbqueue_groups" (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE "dbqueue_jobs" (
    id BLOB NOT NULL PRIMARY KEY,
    task_id TEXT,
    target TEXT NOT NULL,
    fingerprint BLOB,
    payload BLOB NOT NULL,
    key TEXT,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 9),  -- smaller is better: 9 minus what the caller said
    state INTEGER NOT NULL CHECK (state BETWEEN 0 AND 3),  -- 0 pending, 1 running, 2 blocked, 3 unknown
    run_at INTEGER NOT NULL,  -- every instant is UTC microseconds
    ready_at INTEGER,  -- when it became claimable; NULL while it waits for run_at, runs or is held
    queued_at INTEGER,  -- its ready_at when it was last claimed: it waited from there to started_at
    attempt INTEGER NOT NULL DEFAULT 0,
    lapses INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL,
    timeout_ms INTEGER,
    on_crash INTEGER NOT NULL DEFAULT 0,  -- 0 retry, 1 unknown, 2 fail
    token BLOB,
    worker TEXT,
    lease_until INTEGER,
    error_kind TEXT,
    error_summary TEXT,
    source TEXT,
    sequence INTEGER,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    updated_at INTEGER NOT NULL, head BLOB, expires_at INTEGER,
    CONSTRAINT dbqueue_running_has_lease CHECK ((state = 1) = (token IS NOT NULL AND lease_until IS NOT NULL)),
    CONSTRAINT dbqueue_ready_is_pending CHECK (ready_at IS NULL OR state = 0)
);

CREATE INDEX dbqueue_jobs_claim ON "dbqueue_jobs" (queue, priority, ready_at, id) WHERE ready_at IS NOT NULL;

CREATE INDEX dbqueue_jobs_expires ON "dbqueue_jobs" (expires_at) WHERE expires_at IS NOT NULL AND state = 0;

CREATE UNIQUE INDEX dbqueue_jobs_key ON "dbqueue_jobs" (target, key) WHERE key IS NOT NULL AND state IN (0, 1, 3);

CREATE INDEX dbqueue_jobs_lease ON "dbqueue_jobs" (lease_until) WHERE state = 1;

CREATE INDEX dbqueue_jobs_task ON "dbqueue_jobs" (task_id) WHERE task_id IS NOT NULL;

CREATE INDEX dbqueue_jobs_waiting ON "dbqueue_jobs" (run_at, id) WHERE state = 0 AND ready_at IS NULL;

CREATE TABLE "dbqueue_locks" (
    name TEXT NOT NULL PRIMARY KEY,
    token BLOB NOT NULL,
    owner TEXT NOT NULL,  -- for people
    until INTEGER NOT NULL
);

CREATE TABLE "dbqueue_meta" (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE TABLE "dbqueue_migrations" (
    version integer PRIMARY KEY,
    name text NOT NULL,
    applied_at bigint NOT NULL
);

CREATE TABLE "dbqueue_owners" (
    app TEXT NOT NULL PRIMARY KEY,
    digest TEXT NOT NULL,
    beat TEXT NOT NULL,
    since INTEGER NOT NULL
);

CREATE TABLE "dbqueue_queues" (
    name TEXT NOT NULL PRIMARY KEY,
    durable INTEGER NOT NULL,
    auto_delete INTEGER NOT NULL,
    exclusive INTEGER NOT NULL,
    brief INTEGER NOT NULL,  -- transient messages go to the side file's log, where this queue reads them by a cursor
    expires_ms INTEGER,  -- unused for so long, the queue goes
    message_ttl_ms INTEGER,
    arguments TEXT NOT NULL,  -- JSON
    consumed INTEGER NOT NULL DEFAULT 0,  -- had a consumer once: what auto_delete waits for
    used_at INTEGER NOT NULL
);

CREATE TABLE "dbqueue_results" (
    task_id TEXT NOT NULL PRIMARY KEY,
    state TEXT NOT NULL,  -- Celery's
    meta BLOB NOT NULL,
    expires_at INTEGER,
    stored_at INTEGER NOT NULL
);

CREATE INDEX dbqueue_results_expires ON "dbqueue_results" (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE "dbqueue_revoked" (
    task_id TEXT NOT NULL PRIMARY KEY,
    until INTEGER NOT NULL
);

CREATE TABLE "dbqueue_schedules" (
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    spec TEXT NOT NULL,
    timezone TEXT NOT NULL,
    catch_up TEXT NOT NULL,  -- all, latest or skip
    max_age INTEGER,  -- a slot that is older is not fired
    paused INTEGER NOT NULL DEFAULT 0,  -- by hand: the cursor moves on, nothing is fired
    retired INTEGER NOT NULL DEFAULT 0,  -- it left the code that declared it
    static INTEGER NOT NULL DEFAULT 0,  -- declared in code, with this digest
    digest TEXT NOT NULL,
    target TEXT,
    queue TEXT,
    payload BLOB,
    fingerprint BLOB,
    key TEXT,
    priority INTEGER,
    max_attempts INTEGER,
    timeout_ms INTEGER,
    on_crash INTEGER,
    anchor INTEGER NOT NULL,  -- from which an interval counts
    last_slot INTEGER NOT NULL,  -- the cursor: up to here every slot is dealt with; it never moves back
    next_at INTEGER,  -- when to look at it again
    planned TEXT,  -- the spec and zone from which next_at was told: when they are other ones, it is told anew
    fired INTEGER NOT NULL DEFAULT 0,
    fired_at INTEGER,
    error TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (owner, name)
);

CREATE INDEX dbqueue_schedules_next ON "dbqueue_schedules" (owner, next_at) WHERE next_at IS NOT NULL;

CREATE INDEX dbqueue_schedules_unplanned ON "dbqueue_schedules" (owner, updated_at) WHERE planned IS NULL OR planned <> spec || ' ' || timezone;
