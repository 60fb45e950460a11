"""Launched processes: starting them, watching them, and what they report."""
