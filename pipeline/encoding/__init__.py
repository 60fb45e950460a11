"""Encoding of cache entries, shared by both cache stages: missing entries, jobs, prefetching, progress."""
