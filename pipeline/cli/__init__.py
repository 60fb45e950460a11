"""The command `latentline`: what one asks of a recipe, a cache or a LoRA without starting a Dagster run."""
