"""Findings, gates and the checks that several stages share."""
