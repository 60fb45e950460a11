"""The training plan: which samples meet in which optimizer step."""
