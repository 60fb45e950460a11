"""The modules that `accelerate launch` runs in child processes; the only ones that speak Dagster Pipes."""
