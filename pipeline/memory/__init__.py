"""Forecast of the memory and the time that a recipe needs on a GPU, without loading any weights."""
