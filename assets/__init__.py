"""What exists: the Dagster assets, their checks, jobs, schedules and sensors."""
