"""How close Latentline comes to what the machine can do: `make bench`."""

from importlib import import_module

import_module("pipeline")  # before anything here loads Polars, as in a job
