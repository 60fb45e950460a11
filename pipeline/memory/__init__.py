"""Forecast of the memory that a recipe needs on a GPU and on the host, without loading any weights."""
