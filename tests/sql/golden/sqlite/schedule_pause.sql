UPDATE "dbqueue_schedules" SET paused = :yes, updated_at = (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset) WHERE owner = :owner AND name = :name
