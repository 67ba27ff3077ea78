SELECT name FROM "dbqueue_schedules" WHERE owner = :owner AND last_slot > :late AND paused = :no AND retired = :no ORDER BY name LIMIT 20
