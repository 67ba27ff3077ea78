DELETE FROM "dbqueue_schedules" WHERE owner = :owner AND name = :name
