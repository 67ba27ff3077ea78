-- Messages of the Kombu transport are jobs: the body is the payload, everything else about the message is its head.
ALTER TABLE {jobs} ADD COLUMN head BLOB;
ALTER TABLE {jobs} ADD COLUMN expires_at INTEGER;
ALTER TABLE {finished} ADD COLUMN head BLOB;
ALTER TABLE {finished} ADD COLUMN expires_at INTEGER;
CREATE INDEX {prefix}jobs_expires ON {jobs} (expires_at) WHERE expires_at IS NOT NULL AND state = 0;

CREATE TABLE {exchanges} (
    name TEXT NOT NULL PRIMARY KEY,
    type TEXT NOT NULL,  -- direct, topic or fanout
    durable INTEGER NOT NULL,
    auto_delete INTEGER NOT NULL,
    arguments TEXT NOT NULL  -- JSON
);

-- A queue is a name that jobs carry; a row says what was declared about it.
CREATE TABLE {queues} (
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

CREATE TABLE {bindings} (
    exchange TEXT NOT NULL,
    queue TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    PRIMARY KEY (exchange, queue, routing_key)
);
CREATE INDEX {prefix}bindings_queue ON {bindings} (queue);

CREATE TABLE {consumers} (
    tag TEXT NOT NULL PRIMARY KEY,
    queue TEXT NOT NULL,
    worker TEXT NOT NULL,
    alive_until INTEGER NOT NULL  -- moved on by its process; a consumer that is past it died without a word
);
CREATE INDEX {prefix}consumers_queue ON {consumers} (queue);

-- Task ids that were revoked: a message that carries one is not executed.
CREATE TABLE {revoked} (
    task_id TEXT NOT NULL PRIMARY KEY,
    until INTEGER NOT NULL
);
