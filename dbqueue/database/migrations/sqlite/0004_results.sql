-- Results of Celery tasks: what its serializer made of them, opaque to dbqueue.
CREATE TABLE {results} (
    task_id TEXT NOT NULL PRIMARY KEY,
    state TEXT NOT NULL,  -- Celery's
    meta BLOB NOT NULL,
    expires_at INTEGER,
    stored_at INTEGER NOT NULL
);
CREATE INDEX {prefix}results_expires ON {results} (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE {groups} (
    group_id TEXT NOT NULL PRIMARY KEY,
    meta BLOB NOT NULL,
    expires_at INTEGER
);
CREATE INDEX {prefix}groups_expires ON {groups} (expires_at) WHERE expires_at IS NOT NULL;

-- A chord counts its parts; whoever counts the last one publishes the body, in the same transaction where the broker is ours.
CREATE TABLE {chords} (
    group_id TEXT NOT NULL PRIMARY KEY,
    size INTEGER,  -- null: not all parts are published yet
    extra INTEGER NOT NULL DEFAULT 0,  -- parts that were added by others (add_to_chord)
    returned INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    expires_at INTEGER
);
CREATE INDEX {prefix}chords_expires ON {chords} (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE {chord_parts} (
    group_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    part INTEGER NOT NULL,  -- its place in the header; a redelivered part counts once
    meta BLOB NOT NULL,
    PRIMARY KEY (group_id, task_id, part)
);
