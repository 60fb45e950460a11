"""How Latentline works: plain Python and torch, without Dagster."""
