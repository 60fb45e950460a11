"""Launched processes: how they start, report, and end with the process that started them."""
