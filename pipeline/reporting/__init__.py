"""Reports for people and programs: results of checks, stage reports, progress, pictures, the run summary."""
