"""Base models: families, resolving, fingerprints and conversion of checkpoints."""
