UPDATE "dbqueue_schedules" SET last_slot = :last_slot, next_at = :next_at, planned = spec || ' ' || timezone, fired = fired + :fired,
  fired_at = CASE WHEN :fired > 0 THEN CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset ELSE fired_at END, error = :error, updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 + :offset
WHERE owner = :owner AND name = :name AND last_slot = :was
