"""Benchmarks that compare Latentline with the limits of the machine: `make bench`."""

from importlib import import_module

import_module("pipeline")  # Import it before any module that loads Polars, as a job does.
