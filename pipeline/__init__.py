"""Stages that turn images and captions into a LoRA: plain Python and torch, without Dagster."""

import os

# By default Polars' allocator keeps four arenas per core, and memory freed in one cannot be used by another.
# One arena lowers the peak memory of every stage (of a scan by half) and costs no CPU time. Polars reads the
# variable when it is first imported. A value set by the user has precedence.
os.environ.setdefault("_RJEM_MALLOC_CONF", "narenas:1")
