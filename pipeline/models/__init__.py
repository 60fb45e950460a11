"""Base models: families, resolving, fingerprints and checkpoint conversion."""
