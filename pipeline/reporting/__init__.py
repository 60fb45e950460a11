"""What a run tells people and programs: stage reports, progress, pictures and the summary."""
