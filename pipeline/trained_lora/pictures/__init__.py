"""Pictures with a trained LoRA, for `latentline sample`: a grid of steps, strengths and prompts."""
