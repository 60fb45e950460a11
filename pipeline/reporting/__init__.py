"""Reports for people and programs: stage reports, progress, pictures and the run summary."""
