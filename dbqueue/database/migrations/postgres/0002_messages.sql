-- Messages of the Kombu transport are jobs: the body is the payload, everything else about the message is its head.
ALTER TABLE {jobs} ADD COLUMN head bytea, ADD COLUMN expires_at bigint;
ALTER TABLE {finished} ADD COLUMN head bytea, ADD COLUMN expires_at bigint;
CREATE INDEX {prefix}jobs_expires ON {jobs} (expires_at) WHERE expires_at IS NOT NULL AND state = 0;

CREATE TABLE {exchanges} (
    name text PRIMARY KEY,
    type text NOT NULL,  -- direct, topic or fanout
    durable boolean NOT NULL,
    auto_delete boolean NOT NULL,
    arguments text NOT NULL  -- JSON
);

-- A queue is a name that jobs carry; a row says what was declared about it.
CREATE TABLE {queues} (
    name text PRIMARY KEY,
    durable boolean NOT NULL,
    auto_delete boolean NOT NULL,
    exclusive boolean NOT NULL,
    brief boolean NOT NULL,  -- transient messages go to {mail}, where this queue reads them by a cursor
    expires_ms bigint,  -- unused for so long, the queue goes
    message_ttl_ms bigint,
    arguments text NOT NULL,  -- JSON
    consumed boolean NOT NULL DEFAULT false,  -- had a consumer once: what auto_delete waits for
    used_at bigint NOT NULL
);

CREATE TABLE {bindings} (
    exchange text NOT NULL,
    queue text NOT NULL,
    routing_key text NOT NULL,
    PRIMARY KEY (exchange, queue, routing_key)
);
CREATE INDEX {prefix}bindings_queue ON {bindings} (queue);

CREATE TABLE {consumers} (
    tag text PRIMARY KEY,
    queue text NOT NULL,
    worker text NOT NULL,
    alive_until bigint NOT NULL  -- moved on by its process; a consumer that is past it died without a word
);
CREATE INDEX {prefix}consumers_queue ON {consumers} (queue);

-- The log of short-lived messages: remote control, events, replies. It may be gone after a crash of the server, and so may the
-- cursors; the sequence is an ordinary one, so that numbers never start again.
CREATE SEQUENCE {mail_ids};
CREATE UNLOGGED TABLE {mail} (
    id bigint PRIMARY KEY,
    exchange text NOT NULL,
    routing_key text NOT NULL,  -- of the default exchange: the queue
    head bytea NOT NULL,
    payload bytea NOT NULL,
    expires_at bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE UNLOGGED TABLE {cursors} (
    queue text PRIMARY KEY,
    position bigint NOT NULL
) WITH (fillfactor = 50);

-- Task ids that were revoked: a message that carries one is not executed.
CREATE TABLE {revoked} (
    task_id text PRIMARY KEY,
    until bigint NOT NULL
);
