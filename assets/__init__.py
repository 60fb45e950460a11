"""The Dagster layer: assets, checks, jobs, schedules and sensors."""
