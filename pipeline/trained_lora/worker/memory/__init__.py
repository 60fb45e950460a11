"""Forecast of a training's memory on a GPU, without any weights."""
