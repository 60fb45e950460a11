"""Plan, explain, verify and garbage-collect a cache."""
