"""The part of `processes` that runs in launched processes and imports torch."""
