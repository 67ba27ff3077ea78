-- A schedule is a row with a cursor. The owner is '' for schedules of dbqueue itself, which hold what they enqueue; an entry of a
-- Celery app has the app as its owner, and only a beat of that app can make its message.
CREATE TABLE {schedules} (
    owner text NOT NULL,
    name text NOT NULL,
    spec text NOT NULL,
    timezone text NOT NULL,
    catch_up text NOT NULL,  -- all, latest or skip
    max_age bigint,  -- a slot that is older is not fired
    paused boolean NOT NULL DEFAULT false,  -- by hand: the cursor moves on, nothing is fired
    retired boolean NOT NULL DEFAULT false,  -- it left the code that declared it
    static boolean NOT NULL DEFAULT false,  -- declared in code, with this digest
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
    anchor bigint NOT NULL,  -- from which an interval counts
    last_slot bigint NOT NULL,  -- the cursor: up to here every slot is dealt with; it never moves back
    next_at bigint,  -- when to look at it again
    planned text,  -- the spec and zone from which next_at was told: when they are other ones, it is told anew
    fired bigint NOT NULL DEFAULT 0,
    fired_at bigint,
    error text,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    PRIMARY KEY (owner, name)
) WITH (fillfactor = 70);
CREATE INDEX {prefix}schedules_next ON {schedules} (owner, next_at) WHERE next_at IS NOT NULL;
-- With an order that no other index has: else a planner that takes the condition for a common one reads the whole table.
CREATE INDEX {prefix}schedules_unplanned ON {schedules} (owner, updated_at) WHERE planned IS NULL OR planned <> spec || ' ' || timezone;

-- Whose version of a Celery app's entries is the valid one: that of the beat that started last.
CREATE TABLE {owners} (
    app text PRIMARY KEY,
    digest text NOT NULL,
    beat text NOT NULL,
    since bigint NOT NULL
);

CREATE TABLE {locks} (
    name text PRIMARY KEY,
    token uuid NOT NULL,
    owner text NOT NULL,  -- for people
    until bigint NOT NULL
);
