-- A schedule is a row with a cursor. The owner is '' for schedules of dbqueue itself, which hold what they enqueue; an entry of a
-- Celery app has the app as its owner, and only a beat of that app can make its message.
CREATE TABLE {schedules} (
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
CREATE INDEX {prefix}schedules_next ON {schedules} (owner, next_at) WHERE next_at IS NOT NULL;
-- With an order that no other index has: else a planner that takes the condition for a common one reads the whole table.
CREATE INDEX {prefix}schedules_unplanned ON {schedules} (owner, updated_at) WHERE planned IS NULL OR planned <> spec || ' ' || timezone;

-- Whose version of a Celery app's entries is the valid one: that of the beat that started last.
CREATE TABLE {owners} (
    app TEXT NOT NULL PRIMARY KEY,
    digest TEXT NOT NULL,
    beat TEXT NOT NULL,
    since INTEGER NOT NULL
);

CREATE TABLE {locks} (
    name TEXT NOT NULL PRIMARY KEY,
    token BLOB NOT NULL,
    owner TEXT NOT NULL,  -- for people
    until INTEGER NOT NULL
);
