"""Conversion of a model in a single file into the diffusers folder that a recipe uses."""
