"""Encoding process shared by both cache stages; imports torch."""
