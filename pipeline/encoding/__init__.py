"""Shared by the two cache stages: finding missing entries and having them encoded."""
