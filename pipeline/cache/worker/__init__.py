"""The part of the cache that imports torch."""
