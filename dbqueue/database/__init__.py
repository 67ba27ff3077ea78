"""The only floor that speaks SQL: dialects, connections of our own, the caller's connections, migrations."""
