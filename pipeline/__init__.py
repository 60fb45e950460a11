"""How Latentline works: plain Python and torch, without Dagster."""

import os

# By default Polars' allocator has four arenas a core, each with freed memory that the others cannot use. With
# one, the peaks of the stages are lower, of a scan by half of what its samples take, and none takes more CPU.
# Polars reads this when it is first imported, after defaults of its own; what is set already stays.
os.environ.setdefault("_RJEM_MALLOC_CONF", "narenas:1")
