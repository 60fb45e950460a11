"""Findings, gates and checks shared by several stages."""
