"""The process that extracts a LoRA from two models."""
