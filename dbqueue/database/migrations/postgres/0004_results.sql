-- Results of Celery tasks: what its serializer made of them, opaque to dbqueue.
CREATE TABLE {results} (
    task_id text PRIMARY KEY,
    state text NOT NULL,  -- Celery's
    meta bytea NOT NULL,
    expires_at bigint,
    stored_at bigint NOT NULL
);
CREATE INDEX {prefix}results_expires ON {results} (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE {groups} (
    group_id text PRIMARY KEY,
    meta bytea NOT NULL,
    expires_at bigint
);
CREATE INDEX {prefix}groups_expires ON {groups} (expires_at) WHERE expires_at IS NOT NULL;

-- A chord counts its parts; whoever counts the last one publishes the body, in the same transaction where the broker is ours.
CREATE TABLE {chords} (
    group_id text PRIMARY KEY,
    size integer,  -- null: not all parts are published yet
    extra integer NOT NULL DEFAULT 0,  -- parts that were added by others (add_to_chord)
    returned integer NOT NULL DEFAULT 0,
    done boolean NOT NULL DEFAULT false,
    expires_at bigint
) WITH (fillfactor = 50);
CREATE INDEX {prefix}chords_expires ON {chords} (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE {chord_parts} (
    group_id text NOT NULL,
    task_id text NOT NULL,
    part integer NOT NULL,  -- its place in the header; a redelivered part counts once
    meta bytea NOT NULL,
    PRIMARY KEY (group_id, task_id, part)
);
