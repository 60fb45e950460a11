"""Generators of the reference pages in docs/ and of the recipe schema."""
