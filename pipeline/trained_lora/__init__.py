"""Stage 6: a LoRA trained from complete caches."""
