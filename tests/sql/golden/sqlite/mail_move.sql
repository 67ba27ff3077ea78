UPDATE "dbqueue_cursors" SET position = :to WHERE queue = :queue AND position = :at
