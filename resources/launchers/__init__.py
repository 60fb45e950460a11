"""Launchers: where the processes of a step run."""
