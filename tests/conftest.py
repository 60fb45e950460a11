"""Fixtures and settings that several test files share."""

from hypothesis import settings

# The machine is shared: how long an example takes says nothing about the code.
settings.register_profile("latentline", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("latentline")
