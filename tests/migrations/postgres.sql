CREATE TABLE dbqueue_bindings (
    exchange text NOT NULL,
    queue text NOT NULL,
    routing_key text NOT NULL,
    CONSTRAINT dbqueue_bindings_pkey PRIMARY KEY (exchange, queue, routing_key)
);

CREATE TABLE dbqueue_chord_parts (
    group_id text NOT NULL,
    task_id text NOT NULL,
    part integer NOT NULL,
    meta bytea NOT NULL,
    CONSTRAINT dbqueue_chord_parts_pkey PRIMARY KEY (group_id, task_id, part)
);

CREATE TABLE dbqueue_chords (
    group_id text NOT NULL,
    size integer,
    extra integer NOT NULL DEFAULT 0,
    returned integer NOT NULL DEFAULT 0,
    done boolean NOT NULL DEFAULT false,
    expires_at bigint,
    CONSTRAINT dbqueue_chords_pkey PRIMARY KEY (group_id)
) WITH (fillfactor=50);

CREATE TABLE dbqueue_consumers (
    tag text NOT NULL,
    queue text NOT NULL,
    worker text NOT NULL,
    alive_until bigint NOT NULL,
    CONSTRAINT dbqueue_consumers_pkey PRIMARY KEY (tag)
);

CREATE UNLOGGED TABLE dbqueue_cursors (
    queue text NOT NULL,
    position bigint NOT NULL,
    CONSTRAINT dbqueue_cursors_pkey PRIMARY KEY (queue)
) WITH (fillfactor=50);

CREATE TABLE dbqueue_exchanges (
    name text NOT NULL,
    type text NOT NULL,
    durable boolean NOT NULL,
    auto_delete boolean NOT NULL,
    arguments text NOT NULL,
    CONSTRAINT dbqueue_exchanges_pkey PRIMARY KEY (name)
);

CREATE TABLE dbqueue_finished (
    id uuid NOT NULL,
    task_id text,
    target text NOT NULL,
    fingerprint bytea,
    payload bytea,
    key text,
    queue text NOT NULL,
    priority smallint NOT NULL,
    state smallint NOT NULL,
    run_at bigint NOT NULL,
    attempt integer NOT NULL,
    lapses integer NOT NULL,
    max_attempts integer NOT NULL,
    timeout_ms integer,
    on_crash smallint NOT NULL,
    token uuid,
    worker text,
    error_kind text,
    error_summary text,
    source text,
    sequence bigint,
    created_at bigint NOT NULL,
    started_at bigint,
    finished_at bigint NOT NULL,
    head bytea,
    expires_at bigint,
    CONSTRAINT dbqueue_finished_pkey PRIMARY KEY (id, finished_at),
    CONSTRAINT dbqueue_finished_state_check CHECK (((state >= 4) AND (state <= 8)))
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0.02, autovacuum_vacuum_threshold=5000);

CREATE TABLE dbqueue_groups (
    group_id text NOT NULL,
    meta bytea NOT NULL,
    expires_at bigint,
    CONSTRAINT dbqueue_groups_pkey PRIMARY KEY (group_id)
);

CREATE TABLE dbqueue_jobs (
    id uuid NOT NULL,
    task_id text,
    target text NOT NULL,
    fingerprint bytea,
    payload bytea NOT NULL,
    key text,
    queue text NOT NULL,
    priority smallint NOT NULL,
    state smallint NOT NULL,
    run_at bigint NOT NULL,
    ready_at bigint,
    queued_at bigint,
    attempt integer NOT NULL DEFAULT 0,
    lapses integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL,
    timeout_ms integer,
    on_crash smallint NOT NULL DEFAULT 0,
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
    head bytea,
    expires_at bigint,
    CONSTRAINT dbqueue_jobs_pkey PRIMARY KEY (id),
    CONSTRAINT dbqueue_jobs_priority_check CHECK (((priority >= 0) AND (priority <= 9))),
    CONSTRAINT dbqueue_jobs_state_check CHECK (((state >= 0) AND (state <= 3))),
    CONSTRAINT dbqueue_ready_is_pending CHECK (((ready_at IS NULL) OR (state = 0))),
    CONSTRAINT dbqueue_running_has_lease CHECK (((state = 1) = ((token IS NOT NULL) AND (lease_until IS NOT NULL))))
) WITH (autovacuum_analyze_scale_factor=0, autovacuum_analyze_threshold=20000, autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=2000, fillfactor=70);

CREATE TABLE dbqueue_locks (
    name text NOT NULL,
    token uuid NOT NULL,
    owner text NOT NULL,
    until bigint NOT NULL,
    CONSTRAINT dbqueue_locks_pkey PRIMARY KEY (name)
);

CREATE UNLOGGED TABLE dbqueue_mail (
    id bigint NOT NULL,
    exchange text NOT NULL,
    routing_key text NOT NULL,
    head bytea NOT NULL,
    payload bytea NOT NULL,
    expires_at bigint NOT NULL,
    CONSTRAINT dbqueue_mail_pkey PRIMARY KEY (id)
) WITH (autovacuum_vacuum_cost_delay=0, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=5000);

CREATE TABLE dbqueue_meta (
    name text NOT NULL,
    value text NOT NULL,
    CONSTRAINT dbqueue_meta_pkey PRIMARY KEY (name)
);

CREATE TABLE dbqueue_migrations (
    version integer NOT NULL,
    name text NOT NULL,
    applied_at bigint NOT NULL,
    CONSTRAINT dbqueue_migrations_pkey PRIMARY KEY (version)
);

CREATE TABLE dbqueue_owners (
    app text NOT NULL,
    digest text NOT NULL,
    beat text NOT NULL,
    since bigint NOT NULL,
    CONSTRAINT dbqueue_owners_pkey PRIMARY KEY (app)
);

CREATE TABLE dbqueue_queues (
    name text NOT NULL,
    durable boolean NOT NULL,
    auto_delete boolean NOT NULL,
    exclusive boolean NOT NULL,
    brief boolean NOT NULL,
    expires_ms bigint,
    message_ttl_ms bigint,
    arguments text NOT NULL,
    consumed boolean NOT NULL DEFAULT false,
    used_at bigint NOT NULL,
    CONSTRAINT dbqueue_queues_pkey PRIMARY KEY (name)
);

CREATE TABLE dbqueue_results (
    task_id text NOT NULL,
    state text NOT NULL,
    meta bytea NOT NULL,
    expires_at bigint,
    stored_at bigint NOT NULL,
    CONSTRAINT dbqueue_results_pkey PRIMARY KEY (task_id)
);

CREATE TABLE dbqueue_revoked (
    task_id text NOT NULL,
    until bigint NOT NULL,
    CONSTRAINT dbqueue_revoked_pkey PRIMARY KEY (task_id)
);

CREATE TABLE dbqueue_schedules (
    owner text NOT NULL,
    name text NOT NULL,
    spec text NOT NULL,
    timezone text NOT NULL,
    catch_up text NOT NULL,
    max_age bigint,
    paused boolean NOT NULL DEFAULT false,
    retired boolean NOT NULL DEFAULT false,
    static boolean NOT NULL DEFAULT false,
    digest text NOT NULL,
    target text,
    queue text,
    payload bytea,
    fingerprint bytea,
    key text,
    priority smallint,
    max_attempts integer,
    timeout_ms integer,
    on_crash smallint,
    anchor bigint NOT NULL,
    last_slot bigint NOT NULL,
    next_at bigint,
    planned text,
    fired bigint NOT NULL DEFAULT 0,
    fired_at bigint,
    error text,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    CONSTRAINT dbqueue_schedules_pkey PRIMARY KEY (owner, name)
) WITH (fillfactor=70);

CREATE UNIQUE INDEX dbqueue_bindings_pkey ON public.dbqueue_bindings USING btree (exchange, queue, routing_key);

CREATE INDEX dbqueue_bindings_queue ON public.dbqueue_bindings USING btree (queue);

CREATE UNIQUE INDEX dbqueue_chord_parts_pkey ON public.dbqueue_chord_parts USING btree (group_id, task_id, part);

CREATE INDEX dbqueue_chords_expires ON public.dbqueue_chords USING btree (expires_at) WHERE (expires_at IS NOT NULL);

CREATE UNIQUE INDEX dbqueue_chords_pkey ON public.dbqueue_chords USING btree (group_id);

CREATE UNIQUE INDEX dbqueue_consumers_pkey ON public.dbqueue_consumers USING btree (tag);

CREATE INDEX dbqueue_consumers_queue ON public.dbqueue_consumers USING btree (queue);

CREATE UNIQUE INDEX dbqueue_cursors_pkey ON public.dbqueue_cursors USING btree (queue);

CREATE UNIQUE INDEX dbqueue_exchanges_pkey ON public.dbqueue_exchanges USING btree (name);

CREATE UNIQUE INDEX dbqueue_finished_pkey ON public.dbqueue_finished USING btree (id, finished_at);

CREATE INDEX dbqueue_finished_prune ON public.dbqueue_finished USING btree (state, finished_at);

CREATE INDEX dbqueue_finished_task ON public.dbqueue_finished USING btree (task_id) WHERE (task_id IS NOT NULL);

CREATE INDEX dbqueue_groups_expires ON public.dbqueue_groups USING btree (expires_at) WHERE (expires_at IS NOT NULL);

CREATE UNIQUE INDEX dbqueue_groups_pkey ON public.dbqueue_groups USING btree (group_id);

CREATE INDEX dbqueue_jobs_claim ON public.dbqueue_jobs USING btree (queue, priority, ready_at, id) WHERE (ready_at IS NOT NULL);

CREATE INDEX dbqueue_jobs_expires ON public.dbqueue_jobs USING btree (expires_at) WHERE ((expires_at IS NOT NULL) AND (state = 0));

CREATE UNIQUE INDEX dbqueue_jobs_key ON public.dbqueue_jobs USING btree (target, key) WHERE ((key IS NOT NULL) AND (state = ANY (ARRAY[0, 1, 3])));

CREATE INDEX dbqueue_jobs_lease ON public.dbqueue_jobs USING btree (lease_until) WHERE (state = 1);

CREATE UNIQUE INDEX dbqueue_jobs_pkey ON public.dbqueue_jobs USING btree (id);

CREATE INDEX dbqueue_jobs_task ON public.dbqueue_jobs USING btree (task_id) WHERE (task_id IS NOT NULL);

CREATE INDEX dbqueue_jobs_waiting ON public.dbqueue_jobs USING btree (run_at, id) WHERE ((state = 0) AND (ready_at IS NULL));

CREATE UNIQUE INDEX dbqueue_locks_pkey ON public.dbqueue_locks USING btree (name);

CREATE UNIQUE INDEX dbqueue_mail_pkey ON public.dbqueue_mail USING btree (id);

CREATE UNIQUE INDEX dbqueue_meta_pkey ON public.dbqueue_meta USING btree (name);

CREATE UNIQUE INDEX dbqueue_migrations_pkey ON public.dbqueue_migrations USING btree (version);

CREATE UNIQUE INDEX dbqueue_owners_pkey ON public.dbqueue_owners USING btree (app);

CREATE UNIQUE INDEX dbqueue_queues_pkey ON public.dbqueue_queues USING btree (name);

CREATE INDEX dbqueue_results_expires ON public.dbqueue_results USING btree (expires_at) WHERE (expires_at IS NOT NULL);

CREATE UNIQUE INDEX dbqueue_results_pkey ON public.dbqueue_results USING btree (task_id);

CREATE UNIQUE INDEX dbqueue_revoked_pkey ON public.dbqueue_revoked USING btree (task_id);

CREATE INDEX dbqueue_schedules_next ON public.dbqueue_schedules USING btree (owner, next_at) WHERE (next_at IS NOT NULL);

CREATE UNIQUE INDEX dbqueue_schedules_pkey ON public.dbqueue_schedules USING btree (owner, name);

CREATE INDEX dbqueue_schedules_unplanned ON public.dbqueue_schedules USING btree (owner, updated_at) WHERE ((planned IS NULL) OR (planned <> ((spec || ' '::text) || timezone)));

CREATE VIEW dbqueue_all_jobs AS
 SELECT dbqueue_jobs.id,
    dbqueue_jobs.task_id,
    dbqueue_jobs.target,
    dbqueue_jobs.key,
    dbqueue_jobs.queue,
    (9 - dbqueue_jobs.priority) AS priority,
    (ARRAY['pending'::text, 'running'::text, 'blocked'::text, 'unknown'::text])[(dbqueue_jobs.state + 1)] AS state,
    to_timestamp((((dbqueue_jobs.run_at)::numeric / 1000000.0))::double precision) AS run_at,
    (dbqueue_jobs.ready_at IS NOT NULL) AS ready,
    dbqueue_jobs.attempt,
    dbqueue_jobs.max_attempts,
    dbqueue_jobs.lapses,
    dbqueue_jobs.timeout_ms,
    dbqueue_jobs.worker,
    to_timestamp((((dbqueue_jobs.lease_until)::numeric / 1000000.0))::double precision) AS lease_until,
    dbqueue_jobs.error_kind,
    dbqueue_jobs.error_summary,
    to_timestamp((((dbqueue_jobs.created_at)::numeric / 1000000.0))::double precision) AS created_at,
    to_timestamp((((dbqueue_jobs.started_at)::numeric / 1000000.0))::double precision) AS started_at,
    NULL::timestamp with time zone AS finished_at
   FROM dbqueue_jobs
UNION ALL
 SELECT dbqueue_finished.id,
    dbqueue_finished.task_id,
    dbqueue_finished.target,
    dbqueue_finished.key,
    dbqueue_finished.queue,
    (9 - dbqueue_finished.priority) AS priority,
    (ARRAY['succeeded'::text, 'acked'::text, 'dead'::text, 'cancelled'::text, 'discarded'::text])[(dbqueue_finished.state - 3)] AS state,
    to_timestamp((((dbqueue_finished.run_at)::numeric / 1000000.0))::double precision) AS run_at,
    false AS ready,
    dbqueue_finished.attempt,
    dbqueue_finished.max_attempts,
    dbqueue_finished.lapses,
    dbqueue_finished.timeout_ms,
    dbqueue_finished.worker,
    NULL::timestamp with time zone AS lease_until,
    dbqueue_finished.error_kind,
    dbqueue_finished.error_summary,
    to_timestamp((((dbqueue_finished.created_at)::numeric / 1000000.0))::double precision) AS created_at,
    to_timestamp((((dbqueue_finished.started_at)::numeric / 1000000.0))::double precision) AS started_at,
    to_timestamp((((dbqueue_finished.finished_at)::numeric / 1000000.0))::double precision) AS finished_at
   FROM dbqueue_finished;

-- sequence dbqueue_mail_ids
