"""From complete caches to a trained LoRA."""
